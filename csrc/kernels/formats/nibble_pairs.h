// The formats of nibbles.h by bf16 operands, two products an instruction (AVX512-BF16). A code's
// value is exact in bf16; scales multiply the sums of their columns in float32. Decoding takes half
// the instructions that floats take, which is what limits a few rows.
#pragma once

#include "kernels/formats/nibbles.h"

namespace {

// The bf16 values of up to 32 codes.
struct alignas(64) CodeTable {
  uint16_t bits[32];
};

constexpr uint16_t exact_bf16(float value) {
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
}

// q - zero at q + kZeroBias - zero.
constexpr int kZeroBias = 15;
constexpr CodeTable int4_table() {
  CodeTable table{};
  for (int i = 0; i < 32; ++i) table.bits[i] = exact_bf16(static_cast<float>(i - kZeroBias));
  return table;
}

// The codes twice: the permutation reads five bits.
constexpr CodeTable e2m1_table() {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  CodeTable table{};
  for (int i = 0; i < 32; ++i) {
    table.bits[i] = exact_bf16(i % 16 < 8 ? kMagnitudes[i % 8] : -kMagnitudes[i % 8]);
  }
  return table;
}

constexpr CodeTable kInt4Table = int4_table();
constexpr CodeTable kE2m1Table = e2m1_table();

// 64 columns at a time: the 32 even ones are one vector, the odd ones the other.
struct NibblePairs {
  using Operand = moe::Bf16;
  using Row = NibbleRow;
  struct Weights {
    __m512bh even, odd;
    __m512 scale;
  };
  struct Operands {
    __m512bh even, odd;
  };
  static constexpr int64_t kStep = 64;
  static constexpr int64_t kStepBytes = 32;
  // Decoding takes longer than the one addition that sums wait for.
  static constexpr int kChains = 2;
  static constexpr bool kDeinterleaved = true;
  static int64_t position(int64_t k) {
    const int64_t within = k % kStep;
    return k - within + within / 2 + within % 2 * (kStep / 2);
  }
  static const std::byte* address(const Row& row, int64_t k) { return Nibbles::address(row, k); }
  static Operands load_operand(const moe::Bf16* x) {
    return {(__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(x + kStep / 2)};
  }
  static __m512 multiply_add(const Weights& w, const Operands& x, __m512 sum) {
    const __m512 even = _mm512_dpbf16_ps(_mm512_setzero_ps(), w.even, x.even);
    return _mm512_fmadd_ps(_mm512_dpbf16_ps(even, w.odd, x.odd), w.scale, sum);
  }

 protected:
  // The bytes of `count` columns from k, a byte in each 16 bits, zeros after them.
  static __m512i bytes(const Row& row, int64_t k, int64_t count) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << (count + 1) / 2) - 1);
    return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, row.weight + k / 2));
  }
  static __m512i bytes(const Row& row, int64_t k) {
    return _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.weight + k / 2)));
  }
  static __m512bh values(const CodeTable& table, __m512i codes) {
    return (__m512bh)_mm512_permutexvar_epi16(codes, _mm512_load_si512(table.bits));
  }
  static Weights e2m1(__m512i bytes, __m512 scale) {
    // A low nibble's fifth bit is the other's, and both halves of the table are the same.
    return {values(kE2m1Table, bytes), values(kE2m1Table, _mm512_srli_epi16(bytes, 4)), scale};
  }
};

template <class Scale>
struct Int4Pairs : NibblePairs {
  static Row row(const moe::Matrix& m, int64_t expert, int64_t index, int64_t k) {
    return Int4<Scale>::row(m, expert, index, k);
  }
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    return decode(row, bytes(row, k), k, kStep);
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    return decode(row, bytes(row, k, count), k, count);
  }

 private:
  static float scale(const Row& row, int64_t group) {
    return V::to_float(reinterpret_cast<const Scale*>(row.scale)[group]);
  }
  static __m512i offset(const Row& row, int64_t group) {
    const int zero = static_cast<int>(row.zero[group]) >> row.zero_bits & 0xf;
    return _mm512_set1_epi16(static_cast<int16_t>(kZeroBias - zero));
  }
  [[gnu::always_inline]] static Weights decode(const Row& row, __m512i bytes, int64_t k,
                                               int64_t count) {
    // Where groups are wider than 32 columns both halves share one: asking is slower than that.
    const int64_t first = k >> row.shift;
    const int64_t second = (k + (count > 32 ? 32 : 0)) >> row.shift;
    const __m512 scales = V::join_halves(V::set(scale(row, first)), V::set(scale(row, second)));
    __m512i offsets = _mm512_set1_epi16(kZeroBias - 8);
    if (row.zero != nullptr) {
      offsets = _mm512_mask_blend_epi16(0xffff0000u, offset(row, first), offset(row, second));
    }
    const __m512i even = _mm512_and_si512(bytes, _mm512_set1_epi16(0xf));
    const __m512i odd = _mm512_srli_epi16(bytes, 4);
    return {values(kInt4Table, _mm512_add_epi16(even, offsets)),
            values(kInt4Table, _mm512_add_epi16(odd, offsets)), scales};
  }
};

struct Mxfp4Pairs : NibblePairs {
  static Row row(const moe::Matrix& m, int64_t expert, int64_t index, int64_t k) {
    return Mxfp4::row(m, expert, index, k);
  }
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    return e2m1(bytes(row, k), scales(row, k, 64));
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    return e2m1(bytes(row, k, count), scales(row, k, count));
  }

 private:
  static __m512 scale(const Row& row, int64_t group) {
    return V::set(V::from_bits(static_cast<uint32_t>(row.scale[group]) << 23));
  }
  static __m512 scales(const Row& row, int64_t k, int64_t count) {
    const int64_t group = k >> 5;
    return V::join_halves(scale(row, group), scale(row, count > 32 ? group + 1 : group));
  }
};

struct Nvfp4Pairs : NibblePairs {
  static Row row(const moe::Matrix& m, int64_t expert, int64_t index, int64_t k) {
    return Nvfp4::row(m, expert, index, k);
  }
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    int32_t codes;
    __builtin_memcpy(&codes, row.scale + (k >> 4), sizeof codes);
    return e2m1(bytes(row, k), scales(row, codes));
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    int32_t codes = 0;
    __builtin_memcpy(&codes, row.scale + (k >> 4), static_cast<size_t>((count + 15) / 16));
    return e2m1(bytes(row, k, count), scales(row, codes));
  }

 private:
  // Four e4m3 scales of 16 columns, which are four sums each. Through fp16, see avx2/vec.h.
  static __m512 scales(const Row& row, int32_t codes) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_cvtsi32_si128(codes));
    const __m128i half =
        _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m128 scale = _mm_mul_ps(_mm_cvtph_ps(half), _mm_set1_ps(V::kE4m3Scale * row.global));
    const __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(each, _mm512_castps128_ps512(scale));
  }
};

}  // namespace
