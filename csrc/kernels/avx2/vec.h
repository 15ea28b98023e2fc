// Eight floats: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include "kernels/kernel.h"

namespace {

struct V {
  using F = __m256;
  static constexpr int kWidth = 8;
  // Two weight rows by four tokens are 8 accumulators; with the operands they fit 16 registers.
  static constexpr int kRows = 2;
  static constexpr int kStreamRows = 1;  // of quantised weights

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float value) { return _mm256_set1_ps(value); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const moe::Bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const moe::Fp16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // NaN in the first operand gives the second: callers put the checked value second.
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static F select_negative(F sign, F negative, F positive) {
    return _mm256_blendv_ps(positive, negative, sign);
  }
  template <int kRows>
  static void sums(const F (&rows)[kRows], float* to) {
    for (int r = 0; r < kRows; ++r) to[r] = sum(rows[r]);
  }
  static float sum(F a) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
  }

  // Cephes' expf: 2^n e^r, |r| <= ln(2)/2, a polynomial of degree 7 in r. Below 2e-7 relative;
  // saturates outside [-87.3, 88.3]; NaN stays NaN.
  static F exp(F a) {
    const F x = _mm256_max_ps(set(-87.33f), _mm256_min_ps(set(88.3f), a));
    const F n =
        _mm256_round_ps(mul(x, set(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F r = _mm256_fnmadd_ps(n, set(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, set(-2.12194440e-4f), r);
    F p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set(1.0f)));
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(p, _mm256_castsi256_ps(exponent));
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
    const F even = _mm256_shuffle_ps(natural.a, natural.b, 0x88);
    const F odd = _mm256_shuffle_ps(natural.a, natural.b, 0xdd);
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)),
            _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8))};
  }
  static F join_halves(F low, F high) { return _mm256_blend_ps(low, high, 0xf0); }

  // e4m3's fields moved into fp16's: exact, subnormals included, but for 2^8, since fp16's exponent
  // has a bias of 15 and not 7. (Through float32, subnormals would cost an assist each.)
  static constexpr float kE4m3Scale = 256.0f;
  static Pair load_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    // The sign was extended over bits 7 to 15: bit 14 has to go.
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                          _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
  }
  static Pair load_int8(const int8_t* p) {
    const __m128i* from = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(
                _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + kWidth))))};
  }
  static Pair load_uint4(const uint8_t* p) {
    const __m256i bytes = load_bytes(p);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(0xf))),
            _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4))};
  }
  static Pair load_e2m1(const uint8_t* p) {
    const __m256i bytes = load_bytes(p);
    return {e2m1(bytes), e2m1(_mm256_srli_epi32(bytes, 4))};
  }

 private:
  static __m256i load_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // The low four bits of each lane: a table of the eight magnitudes, and a sign.
  static F e2m1(__m256i codes) {
    const F magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i sign =
        _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign));
  }
};

}  // namespace
