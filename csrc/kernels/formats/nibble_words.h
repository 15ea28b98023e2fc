// The formats of nibble_rows.h by activations of 16 bits, whole numbers both: two products a lane
// and instruction (AVX512-VNNI). A float for each 8 activations scales them, the largest of which
// has 15 bits: finer than bf16. Sums of 8 products stay below 2^31. Where that leaves the others
// few bits, beside one that is much larger, what was rounded away is kept and multiplied too.
//
// 64 bytes of weights are 32 words of four codes. A table looks up a code in each byte (VBMI), for
// the even columns, and after a shift for the odd ones; of both, the high bytes masked and the low
// bytes shifted into their place are words with 256 times the value. So part p has columns p,
// p + 4, ..., and lane i of the products is columns [8 i, 8 i + 8). (vpermw would look up words,
// but takes two instructions' time, on the ports of both shifts and permutations.)
#pragma once

#include "kernels/formats/lane_scales.h"
#include "kernels/formats/nibble_tables.h"

namespace {

// 128 activations, in the place of as many floats.
struct WordBlock {
  int16_t part[4][32];
  float scale[16];     // of a lane's 8 columns
  int8_t rest[4][32];  // what was rounded away, by 256; stale but in the lanes that have it
  uint8_t has_rest[16];

  __m128i lanes() const { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(has_rest)); }
};
static_assert(sizeof(WordBlock) <= 128 * sizeof(float));

// F gives rows, and for the 128 columns from k on, of which `count` are there, the table and the
// scales; kUnit is what 1 in the table stands for. Where `has_zeros`, `zeros` are taken from what
// the table gives.
template <class F>
struct NibbleWords : F {
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 4;
  static constexpr int kChains = 4;
  static constexpr int64_t kStep = kLaneColumns;
  static constexpr int64_t kStepBytes = 64;
  // Columns that share a scale, so that they are stored together.
  static constexpr int64_t kTogether = 8;
  using Operand = float;
  using Row = NibbleRow;

  static void arrange(float* x) {
    float natural[kStep];
    __builtin_memcpy(natural, x, sizeof natural);
    for (int64_t k = 0; k < kStep; k += kTogether) store_together(natural + k, k, x);
  }

  // 8 columns from k on.
  static void store_together(const float* values, int64_t k, float* x) {
    constexpr float kMost = 32767.0f;
    const __m256 v = _mm256_loadu_ps(values);
    // As whole numbers, so that NaN is the largest.
    const __m256i sizes = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(0x7fffffff));
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    const bool is_infinite = _mm_cvtsi128_si32(most) == 0x7f800000;
    // Nothing is divided by zero; NaN, as the second operand, stays.
    const __m128 largest = _mm_max_ss(_mm_set_ss(1e-30f), (__m128)most);
    const __m256 factor = _mm256_broadcastss_ps(_mm_div_ss(_mm_set_ss(kMost), largest));
    // Beside infinity the others are nothing; by the factor, which is 0 then, it would be NaN.
    const __m256 scaled = is_infinite ? signs_of_infinities(v) : _mm256_mul_ps(v, factor);
    const __m256i whole = _mm256_cvtps_epi32(scaled);
    auto* to = reinterpret_cast<WordBlock*>(x + k / kStep * kStep);
    const int64_t lane = k % kStep / kTogether;
    // Columns p and p + 4 are a lane of part p.
    const __m128i words =
        _mm_shuffle_epi8(_mm256_cvtsepi32_epi16(whole),
                         _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    int32_t word_pairs[4];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(word_pairs), words);
    for (int p = 0; p < 4; ++p) __builtin_memcpy(to->part[p] + 2 * lane, word_pairs + p, 4);
    to->scale[lane] = _mm_cvtss_f32(largest) * (F::kUnit / 256.0f / kMost);

    to->has_rest[lane] = !is_infinite && needs_rest(scaled);
    if (to->has_rest[lane] == 0) return;
    const __m256 rest = _mm256_sub_ps(scaled, _mm256_cvtepi32_ps(whole));
    const __m128i bytes = _mm_shuffle_epi8(
        _mm256_cvtsepi32_epi8(_mm256_cvtps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(256.0f)))),
        _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, -1, -1, -1, -1, -1, -1, -1, -1));
    int16_t byte_pairs[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(byte_pairs), bytes);
    for (int p = 0; p < 4; ++p) __builtin_memcpy(to->rest[p] + 2 * lane, byte_pairs + p, 2);
  }

  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void step(const Row* rows, const float* const* x, int64_t k,
                                          int64_t left, V::F (&sum)[kRows][kTokens]) {
    // As many rows in turns as keep their sums in registers: instructions wait for each other along
    // a row.
    constexpr int kTurns = kRows * kTokens <= 8 ? kRows : 2;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r += kTurns) {
      // All rows have zero points or none.
      if (F::has_zeros(rows[0])) {
        multiply<kTurns, kTokens, true>(rows + r, x, k, left, sum + r);
      } else {
        multiply<kTurns, kTokens, false>(rows + r, x, k, left, sum + r);
      }
    }
  }

  // Whether a token has rests in its first `count` columns.
  static bool has_rests(const float* x, int64_t count) {
    __m128i any = _mm_setzero_si128();
    for (int64_t k = 0; k < count; k += kStep) {
      any = _mm_or_si128(any, reinterpret_cast<const WordBlock*>(x + k)->lanes());
    }
    return !_mm_testz_si128(any, any);
  }

  // What they add to the token's product with a row.
  static float rests(const Row& row, const float* x, int64_t count) {
    V::F sum = V::zero();
    for (int64_t k = 0; k < count; k += kStep) {
      sum = V::add(sum, rests(row, *reinterpret_cast<const WordBlock*>(x + k), k, count - k));
    }
    return _mm512_reduce_add_ps(sum);
  }

 private:
  // Whether most of them, zeros aside, have less than 7 bits of the 15. What is lost of a few is
  // lost among the others.
  static bool needs_rest(__m256 scaled) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), scaled);
    const int there = _mm256_cmp_ps_mask(size, _mm256_setzero_ps(), _CMP_GT_OQ);
    const int small = there & _mm256_cmp_ps_mask(size, _mm256_set1_ps(128.0f), _CMP_LT_OQ);
    return 2 * __builtin_popcount(small) > __builtin_popcount(there);
  }

  // 1 and -1 for infinities, 0 for the others.
  static __m256 signs_of_infinities(__m256 v) {
    const __m256 ones = _mm256_or_ps(_mm256_and_ps(v, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
    const __mmask8 finite = _mm256_cmp_ps_mask(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v),
                                               _mm256_set1_ps(3.4028235e38f), _CMP_LE_OQ);
    return _mm256_mask_mov_ps(ones, finite, _mm256_setzero_ps());
  }

  // The same for each lane of a block, of whose columns `left` are there.
  static __m512 rests(const Row& row, const WordBlock& block, int64_t k, int64_t left) {
    const __m512i codes = load(row, k, left);
    const __m512i table = _mm512_load_si512(F::table(row, k).value);
    __m512i products = _mm512_setzero_si512();
    for (int p = 0; p < 4; ++p) {
      __m512i bytes =
          _mm512_permutexvar_epi8(p % 2 == 0 ? codes : _mm512_srli_epi16(codes, 4), table);
      if (F::has_zeros(row)) {
        bytes = _mm512_sub_epi8(bytes, F::zeros(row, k, left < kStep ? left : kStep));
      }
      const __m512i w =
          p < 2 ? _mm512_slli_epi16(bytes, 8)
                : _mm512_and_si512(bytes, _mm512_set1_epi16(static_cast<int16_t>(0xff00)));
      const __m256i rest = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.rest[p]));
      products = _mm512_dpwssd_epi32(products, w, _mm512_cvtepi8_epi16(rest));
    }
    const V::F scales =
        V::mul(F::scales(row, k, left < kStep ? left : kStep), V::load(block.scale));
    const __m128i lanes = block.lanes();
    return _mm512_maskz_mul_ps(_mm_test_epi8_mask(lanes, lanes), _mm512_cvtepi32_ps(products),
                               V::mul(scales, V::set(1.0f / 256.0f)));
  }

  template <int kRows, int kTokens, bool kZeros>
  [[gnu::always_inline]] static void multiply(const Row* rows, const float* const* x, int64_t k,
                                              int64_t left, V::F (*sum)[kTokens]) {
    const WordBlock* block[kTokens];
    for (int t = 0; t < kTokens; ++t) block[t] = reinterpret_cast<const WordBlock*>(x[t] + k);
    __m512i codes[kRows];
    __m512i products[kRows][kTokens];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) codes[r] = load(rows[r], k, left);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      __m512i bytes[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i table = _mm512_load_si512(F::table(rows[r], k).value);
        bytes[r] =
            _mm512_permutexvar_epi8(odd == 0 ? codes[r] : _mm512_srli_epi16(codes[r], 4), table);
        if constexpr (kZeros) {
          bytes[r] = _mm512_sub_epi8(bytes[r], F::zeros(rows[r], k, left < kStep ? left : kStep));
        }
      }
#pragma GCC unroll 2
      for (int high = 0; high < 2; ++high) {
        const int p = odd + 2 * high;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m512i w =
              high == 0
                  ? _mm512_slli_epi16(bytes[r], 8)
                  : _mm512_and_si512(bytes[r], _mm512_set1_epi16(static_cast<int16_t>(0xff00)));
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            const __m512i v = _mm512_loadu_si512(block[t]->part[p]);
            // The first has no sum to add to: with one of zero, a register would be cleared for it.
            products[r][t] =
                p == 0 ? _mm512_madd_epi16(w, v) : _mm512_dpwssd_epi32(products[r][t], w, v);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V::F scales = F::scales(rows[r], k, left < kStep ? left : kStep);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        sum[r][t] = V::fma(_mm512_cvtepi32_ps(products[r][t]),
                           V::mul(scales, V::load(block[t]->scale)), sum[r][t]);
      }
    }
  }

  [[gnu::always_inline]] static __m512i load(const Row& row, int64_t k, int64_t left) {
    if (left >= kStep) return _mm512_loadu_si512(row.weight + k / 2);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << (left + 1) / 2) - 1, row.weight + k / 2);
  }
};

// Scales are of the activations' dtype, which is bf16 here.
struct Int4Narrow : Int4Rows<moe::Bf16> {
  static constexpr float kUnit = 1.0f;
  // Those of several groups in a step.
  static bool has_zeros(const NibbleRow& row) { return row.zero != nullptr; }
  static const ByteTable& table(const NibbleRow& row, int64_t) {
    return kInt4ByteTables.of_zero[has_zeros(row) ? 0 : 8];
  }
  [[gnu::always_inline]] static __m512i zeros(const NibbleRow& row, int64_t k, int64_t count) {
    const __m128i words = int4_zeros(row, k, count);
    return _mm512_permutexvar_epi16(
        word_groups(row), _mm512_castsi128_si512(_mm_or_si128(words, _mm_slli_epi16(words, 8))));
  }
  [[gnu::always_inline]] static __m512 scales(const NibbleRow& row, int64_t k, int64_t count) {
    return int4_scales(row, k, count);
  }
};

// A step is of one group, whose zero point is the table's.
template <bool kZeros>
struct Int4Wide : Int4Rows<moe::Bf16> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool has_zeros(const NibbleRow&) { return false; }
  [[gnu::always_inline]] static const ByteTable& table(const NibbleRow& row, int64_t k) {
    return kInt4ByteTables.of_zero[kZeros ? stored_zero(row, k >> row.shift) : 8];
  }
  static __m512i zeros(const NibbleRow&, int64_t, int64_t) { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static __m512 scales(const NibbleRow& row, int64_t k, int64_t) {
    return int4_scale(row, k);
  }
};

// Any of these, by what a matrix has: decided for a product, not for each of its steps.
struct Int4Bytes : Int4Narrow {
  template <class Do>
  [[gnu::always_inline]] static void choose(const moe::Matrix& matrix, const Do& with) {
    if (int64_t{1} << matrix.scale_shift < kLaneColumns) {
      with.template operator()<NibbleWords<Int4Narrow>>();
    } else if (matrix.zero != nullptr) {
      with.template operator()<NibbleWords<Int4Wide<true>>>();
    } else {
      with.template operator()<NibbleWords<Int4Wide<false>>>();
    }
  }
};

struct E2m1Bytes {
  static constexpr float kUnit = 0.5f;
  static constexpr bool has_zeros(const NibbleRow&) { return false; }
  static const ByteTable& table(const NibbleRow&, int64_t) { return kE2m1Bytes; }
  static __m512i zeros(const NibbleRow&, int64_t, int64_t) { return _mm512_setzero_si512(); }
};

struct Mxfp4Bytes : Mxfp4Rows, E2m1Bytes {
  [[gnu::always_inline]] static __m512 scales(const NibbleRow& row, int64_t k, int64_t count) {
    return mxfp4_scales(row, k, count);
  }
};

struct Nvfp4Bytes : Nvfp4Rows, E2m1Bytes {
  [[gnu::always_inline]] static __m512 scales(const NibbleRow& row, int64_t k, int64_t count) {
    return nvfp4_scales(row, k, count);
  }
};

}  // namespace
