// The formats of nibble_rows.h by float operands with AVX-512: a table of the 16 scaled values for
// the columns that share a scale, so that decoding 16 weights is a shift and a permutation, and
// scales cost next to nothing. On Sapphire Rapids a vdpbf16ps takes as long as four f32
// multiply-adds (0.85 and 0.19-0.31 ns, 16 threads), which give half its products: floats are
// faster there, bf16 (nibble_pairs.h) on Zen 4, where it takes no longer than one. Faster still are
// whole numbers (nibble_quads.h): these are for CPUs without VNNI, and for finer activations.
//
// The 16 bytes of 32 columns are broadcast to the four 128-bit lanes, and lane l shifted by l
// nibbles, for the second vector by 4 + l: the permutation reads the low four bits of each dword.
// So operands are stored with column c of 32 at position c % 8 * 4 + c / 8.
#pragma once

#include "kernels/formats/nibble_rows.h"
#include "kernels/formats/numbers.h"

namespace {

// F gives rows; the table for the 32 columns from k on, of which `left` are there; how many columns
// share it; and the values of 16 codes.
template <class F>
struct NibbleFloats : F {
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 4;
  static constexpr int kChains = 4;
  static constexpr int64_t kStep = 128;
  static constexpr int64_t kStepBytes = 64;
  using Operand = float;
  using Row = NibbleRow;

  static int64_t position(int64_t k) {
    const int64_t column = k % kColumns;
    return k - column + column % 8 * 4 + column / 8;
  }
  static void arrange(float* x) {
    const __m512i first =
        _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    for (int64_t k = 0; k < kStep; k += kColumns) {
      const __m512 low = V::load(x + k);
      const __m512 high = V::load(x + k + V::kWidth);
      V::store(x + k, _mm512_permutex2var_ps(low, first, high));
      V::store(x + k + V::kWidth, _mm512_permutex2var_ps(low, second, high));
    }
  }

  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void step(const Row* rows, const float* const* x, int64_t k,
                                          int64_t left, V::F (&sum)[kRows][kTokens]) {
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(16));
    // One scale for all the rows' columns, so one mask.
    const int64_t shared = F::shared_columns(rows[0]);
    typename F::Table table[kRows];
#pragma GCC unroll 4
    for (int64_t c = 0; c < kStep; c += kColumns) {
      if (c >= left) break;
      if (c == 0 || (c & (shared - 1)) == 0) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) table[r] = F::table(rows[r], k + c, left - c);
      }
      __m512i words[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) words[r] = load(rows[r], k + c, left - c);
      multiply(table, words, first, x, k + c, sum);
      multiply(table, words, second, x, k + c + V::kWidth, sum);
    }
  }

 private:
  static constexpr int64_t kColumns = 32;

  [[gnu::always_inline]] static __m512i load(const Row& row, int64_t k, int64_t left) {
    const uint8_t* from = row.weight + k / 2;
    const __m128i bytes =
        left >= kColumns
            ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))
            : _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << (left + 1) / 2) - 1), from);
    return _mm512_broadcast_i32x4(bytes);
  }

  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void multiply(const typename F::Table (&table)[kRows],
                                              const __m512i (&words)[kRows], __m512i shifts,
                                              const float* const* x, int64_t k,
                                              V::F (&sum)[kRows][kTokens]) {
    V::F w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      w[r] = F::values(table[r], _mm512_srlv_epi32(words[r], shifts));
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const V::F v = V::load(x[t] + k);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][t] = V::fma(w[r], v, sum[r][t]);
    }
  }
};

constexpr Numbers power_numbers() {
  Numbers numbers{};
  for (uint32_t i = 0; i < 256; ++i) numbers.of[i] = __builtin_bit_cast(float, i << 23);
  return numbers;
}
constexpr Numbers kPowers = power_numbers();
constexpr float kIntegers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// A table for all 32 columns.
struct OneTable {
  using Table = __m512;
  static __m512 values(const __m512& table, __m512i codes) {
    return _mm512_permutexvar_ps(codes, table);
  }
};

template <class Scale>
struct Int4Table : Int4Rows<Scale>, OneTable {
  static int64_t shared_columns(const NibbleRow& row) { return int64_t{1} << row.shift; }
  [[gnu::always_inline]] static __m512 table(const NibbleRow& row, int64_t k, int64_t) {
    const int64_t group = k >> row.shift;
    const V::F values = V::sub(V::load(kIntegers), V::set(kIntegers[Int4Table::zero(row, group)]));
    return V::mul(values, V::set(Int4Table::scale(row, group)));
  }
};

struct Mxfp4Table : Mxfp4Rows, OneTable {
  static int64_t shared_columns(const NibbleRow&) { return 32; }
  [[gnu::always_inline]] static __m512 table(const NibbleRow& row, int64_t k, int64_t) {
    const auto exponent = static_cast<uint8_t>(row.scale[k >> 5]);
    return V::mul(V::e2m1_values(), V::set(kPowers.of[exponent]));
  }
};

// Two scales for 32 columns, of dwords 0 and 1 and of dwords 2 and 3 of each lane: the table is
// that of the codes, and what is kept are the scales.
struct Nvfp4Table : Nvfp4Rows {
  using Table = __m512;
  static int64_t shared_columns(const NibbleRow&) { return 32; }
  [[gnu::always_inline]] static __m512 table(const NibbleRow& row, int64_t k, int64_t left) {
    const auto* codes = reinterpret_cast<const uint8_t*>(row.scale + (k >> 4));
    const V::F first = V::set(kE4m3Numbers.of[codes[0]]);
    const V::F second = V::set(kE4m3Numbers.of[left > 16 ? codes[1] : 0]);
    return V::mul(_mm512_mask_blend_ps(0xcccc, first, second), V::set(row.global));
  }
  static __m512 values(const __m512& scales, __m512i codes) {
    return V::mul(_mm512_permutexvar_ps(codes, V::e2m1_values()), scales);
  }
};

}  // namespace
