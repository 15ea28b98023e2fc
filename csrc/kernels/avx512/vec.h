// Sixteen floats: AVX-512 F, BW, DQ, VL.
#pragma once

#include <immintrin.h>

#include "kernels/kernel.h"

namespace {

struct V {
  using F = __m512;
  static constexpr int kWidth = 16;
  // Four weight rows by four tokens are 16 accumulators of 32 registers.
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 4;  // of quantised weights

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const moe::Bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F load(const moe::Fp16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  // By a reciprocal and one Newton step, to 2 ulp: Intel's cores divide a vector in 16 cycles,
  // which for an activation is as long as all the rest of it.
  static F div(F a, F b) {
    const F r = _mm512_rcp14_ps(b);
    return mul(a, mul(r, _mm512_fnmadd_ps(b, r, set(2.0f))));
  }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F select_negative(F sign, F negative, F positive) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), positive,
                                negative);
  }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }
  // Four at once take half the instructions.
  template <int kRows>
  static void sums(const F (&rows)[kRows], float* to) {
    if constexpr (kRows == 4) {
      const F ab = add(_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
      const F cd = add(_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
      const F lanes = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
      const __m256 halves =
          _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
      _mm_storeu_ps(to,
                    _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
    } else {
      for (int r = 0; r < kRows; ++r) to[r] = sum(rows[r]);
    }
  }

  // Cephes' expf, see avx2/vec.h.
  static F exp(F a) {
    const F x = _mm512_max_ps(set(-87.33f), _mm512_min_ps(set(88.3f), a));
    const F n = _mm512_roundscale_ps(mul(x, set(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F r = _mm512_fnmadd_ps(n, set(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, set(-2.12194440e-4f), r);
    F p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set(1.0f)));
    return _mm512_scalef_ps(p, n);
  }

  static void store_scalar(float* p, float value) { *p = value; }
  // To nearest, ties to even; NaN stays NaN.
  static moe::Bf16 to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  }
  static float to_float(float value) { return value; }
  static float to_float(moe::Bf16 value) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(value.bits) << 16)));
  }
  static float to_float(moe::Fp16 value) { return _cvtsh_ss(value.bits); }

  // bf16 operands, rounded to nearest, ties to even; NaN stays NaN.
  static void store(moe::Bf16* p, F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), nan, bits,
                                                 _mm512_set1_epi32(0x00400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static void store_scalar(moe::Bf16* p, float value) { *p = to_bf16(value); }

  static uint32_t to_bits(float value) {
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(value))));
  }
  static float from_bits(uint32_t bits) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits))));
  }
  static float e4m3_to_float(uint8_t code) {
    const uint32_t half = (code & 0x80u) << 8 | (code & 0x7fu) << 7;
    return _cvtsh_ss(static_cast<uint16_t>(half)) * kE4m3Scale;
  }

  // Weights come two vectors at a time.
  struct Pair {
    F a, b;
  };
  static Pair deinterleave(Pair natural) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_permutex2var_ps(natural.a, even, natural.b),
            _mm512_permutex2var_ps(natural.a, odd, natural.b)};
  }
  static F join_halves(F low, F high) { return _mm512_mask_blend_ps(0xff00, low, high); }

  // Through fp16, see avx2/vec.h.
  static constexpr float kE4m3Scale = 256.0f;
  static Pair load_e4m3(const uint8_t* p) {
    const __m512i wide =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(wide, 7),
                                          _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(half)),
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
  }
  static Pair load_int8(const int8_t* p) {
    const __m128i* from = reinterpret_cast<const __m128i*>(p);
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))),
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)))};
  }
  static F e2m1_values() {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                          -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  }
};

}  // namespace
