// The formats of nibble_rows.h by bf16 operands, see strided_pairs.h.
#pragma once

#include "kernels/formats/lane_scales.h"
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
    const bool is_wide = int64_t{1} << row.shift >= kStep;
    const __m512 scale = is_wide ? int4_scale(row, k) : int4_scales(row, k, count);
    if (row.zero == nullptr || is_wide) {
      return NibblePairs::decode(kInt4Tables.of_zero[zero(row, k >> row.shift)], words, scale);
    }
    const __m128i each = _mm_sub_epi16(_mm_set1_epi16(kZeroBias), int4_zeros(row, k, count));
    const __m512i offsets =
        _mm512_permutexvar_epi16(word_groups(row), _mm512_castsi128_si512(each));
    Weights weights{.part = {}, .scale = scale};
    for (int p = 0; p < 4; ++p) {
      const __m512i nibbles =
          _mm512_and_si512(_mm512_srli_epi16(words, 4 * p), _mm512_set1_epi16(0xf));
      weights.part[p] = lookup(kInt4ZerosTable, _mm512_add_epi16(nibbles, offsets));
    }
    return weights;
  }
};

struct Mxfp4Pairs : NibblePairs<Mxfp4Rows> {
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    return decode(kE2m1Table, words(row, k), mxfp4_scales(row, k, kStep));
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    return decode(kE2m1Table, words(row, k, count), mxfp4_scales(row, k, count));
  }
};

struct Nvfp4Pairs : NibblePairs<Nvfp4Rows> {
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    return decode(kE2m1Table, words(row, k), nvfp4_scales(row, k, kStep));
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    return decode(kE2m1Table, words(row, k, count), nvfp4_scales(row, k, count));
  }
};

}  // namespace
