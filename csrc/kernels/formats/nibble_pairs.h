// The formats of nibble_rows.h by bf16 operands, see strided_pairs.h.
#pragma once

#include "kernels/formats/nibble_rows.h"
#include "kernels/formats/strided_pairs.h"

namespace {

// The bf16 values of up to 32 codes.
struct alignas(64) CodeTable {
  uint16_t bits[32];
};

constexpr uint16_t exact_bf16(float value) {
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
}

// i + first for i in [0, period), repeated.
constexpr CodeTable integer_table(int first, int period) {
  CodeTable table{};
  for (int i = 0; i < 32; ++i) table.bits[i] = exact_bf16(static_cast<float>(i % period + first));
  return table;
}

constexpr CodeTable e2m1_table() {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  CodeTable table{};
  for (int i = 0; i < 32; ++i) {
    table.bits[i] = exact_bf16(i % 16 < 8 ? kMagnitudes[i % 8] : -kMagnitudes[i % 8]);
  }
  return table;
}

// Permutations read five bits. The tables of four bits are there twice, so that what is above a
// nibble need not be masked.
constexpr CodeTable kE2m1Table = e2m1_table();
// q - zero, for each zero point.
struct Int4Tables {
  CodeTable of_zero[16];
};
constexpr Int4Tables int4_tables() {
  Int4Tables tables{};
  for (int zero = 0; zero < 16; ++zero) tables.of_zero[zero] = integer_table(-zero, 16);
  return tables;
}
constexpr Int4Tables kInt4Tables = int4_tables();
// q - zero at q + kZeroBias - zero, for zero points that differ within a vector.
constexpr int kZeroBias = 15;
constexpr CodeTable kInt4ZerosTable = integer_table(-kZeroBias, 32);

// R gives rows.
template <class R>
struct NibblePairs : StridedPairs<4>, R {
  using Row = NibbleRow;

 protected:
  static __m512i words(const Row& row, int64_t k) {
    return StridedPairs::words(row.weight + k / 2);
  }
  static __m512i words(const Row& row, int64_t k, int64_t count) {
    return StridedPairs::words(row.weight + k / 2, (count + 1) / 2);
  }
  static __m512bh lookup(const CodeTable& table, __m512i codes) {
    return (__m512bh)_mm512_permutexvar_epi16(codes, _mm512_load_si512(table.bits));
  }
  [[gnu::always_inline]] static Weights decode(const CodeTable& table, __m512i words,
                                               __m512 scale) {
    return {
        {lookup(table, words), lookup(table, _mm512_srli_epi16(words, 4)),
         lookup(table, _mm512_srli_epi16(words, 8)), lookup(table, _mm512_srli_epi16(words, 12))},
        scale};
  }
};

// Scales are of the activations' dtype, which is bf16 here.
struct Int4Pairs : NibblePairs<Int4Rows<moe::Bf16>> {
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    return decode(row, words(row, k), k, kStep);
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    return decode(row, words(row, k, count), k, count);
  }

 private:
  [[gnu::always_inline]] static Weights decode(const Row& row, __m512i words, int64_t k,
                                               int64_t count) {
    const int64_t group = k >> row.shift;
    const int64_t groups = (count + (int64_t{1} << row.shift) - 1) >> row.shift;
    const auto there = static_cast<__mmask8>((1u << groups) - 1);
    // The group of each word's four columns.
    const __m512i each = _mm512_srl_epi16(word_numbers(), _mm_cvtsi64_si128(row.shift - 2));
    const __m128i codes = _mm_maskz_loadu_epi16(there, row.scale + group * 2);
    const __m512 scale =
        (__m512)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, each, _mm512_castsi128_si512(codes));
    if (row.zero == nullptr) return NibblePairs::decode(kInt4Tables.of_zero[8], words, scale);
    if (int64_t{1} << row.shift >= kStep) {
      return NibblePairs::decode(kInt4Tables.of_zero[zero(row, group)], words, scale);
    }
    const __m128i bytes = _mm_cvtepu8_epi16(_mm_maskz_loadu_epi8(there, row.zero + group));
    const __m128i zeros =
        _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi64_si128(row.zero_bits)), _mm_set1_epi16(0xf));
    const __m512i offsets = _mm512_permutexvar_epi16(
        each, _mm512_castsi128_si512(_mm_sub_epi16(_mm_set1_epi16(kZeroBias), zeros)));
    Weights weights{.part = {}, .scale = scale};
    for (int p = 0; p < 4; ++p) {
      const __m512i nibbles =
          _mm512_and_si512(_mm512_srli_epi16(words, 4 * p), _mm512_set1_epi16(0xf));
      weights.part[p] = lookup(kInt4ZerosTable, _mm512_add_epi16(nibbles, offsets));
    }
    return weights;
  }
  static __m512i word_numbers() {
    return _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                            13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  }
};

struct Mxfp4Pairs : NibblePairs<Mxfp4Rows> {
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    int32_t exponents;
    __builtin_memcpy(&exponents, row.scale + (k >> 5), sizeof exponents);
    return decode(kE2m1Table, words(row, k), scales(exponents));
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    int32_t exponents = 0;
    __builtin_memcpy(&exponents, row.scale + (k >> 5), static_cast<size_t>((count + 31) / 32));
    return decode(kE2m1Table, words(row, k, count), scales(exponents));
  }

 private:
  // Four exponents of 32 columns, which are four lanes each: turned to where a float has its own.
  static __m512 scales(int32_t exponents) {
    const __m512i turns =
        _mm512_setr_epi32(23, 23, 23, 23, 15, 15, 15, 15, 7, 7, 7, 7, 31, 31, 31, 31);
    return (__m512)_mm512_and_si512(_mm512_rolv_epi32(_mm512_set1_epi32(exponents), turns),
                                    _mm512_set1_epi32(0x7f800000));
  }
};

struct Nvfp4Pairs : NibblePairs<Nvfp4Rows> {
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    int64_t codes;
    __builtin_memcpy(&codes, row.scale + (k >> 4), sizeof codes);
    return decode(kE2m1Table, words(row, k), scales(row, codes));
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    int64_t codes = 0;
    __builtin_memcpy(&codes, row.scale + (k >> 4), static_cast<size_t>((count + 15) / 16));
    return decode(kE2m1Table, words(row, k, count), scales(row, codes));
  }

 private:
  // Eight e4m3 scales of 16 columns, which are two lanes each. Through fp16, see avx2/vec.h.
  static __m512 scales(const Row& row, int64_t codes) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_cvtsi64_si128(codes));
    const __m128i half =
        _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m256 scale =
        _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(V::kE4m3Scale * row.global));
    const __m512i each = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(each, _mm512_castps256_ps512(scale));
  }
};

}  // namespace
