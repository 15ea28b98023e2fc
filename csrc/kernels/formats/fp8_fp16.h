// FP8 of fp8_words.h by fp16 operands (AVX512-FP16, which CPUs with AMX have): nothing is
// converted, and an instruction multiplies 32 columns. Instructions for 64 bytes of weights and t
// tokens: 5.5 and 3 t; through floats 13 and 4.5 t.
//
// What fp16 rounds, by 2^-12 each time: four products of a group of 128 columns, kGroups sums of
// those times the group's scale, and two halves of these; then they are added in float32. So 13
// roundings at most, 3.2e-3 where all go one way, and 4e-4 of a product's norm with random numbers.
// None overflows: a row of operands has been multiplied by a power of two that puts the largest
// below 2^kMostExponent, and scales are divided by the row's largest. What is 2^18 times smaller
// than the largest of its row is rounded more.
#pragma once

#include "kernels/fetch.h"
#include "kernels/formats/fp8_words.h"

namespace {

struct Fp8Fp16 : Fp8Words {
 private:
  static constexpr int kRows = 4;
  // The weights are 1/256 of what they stand for.
  static constexpr float kUnit = 256.0f;
  static constexpr int64_t kGroup = 2 * kLine;
  // Groups whose sums are added in fp16.
  static constexpr int64_t kGroups = 8;
  static constexpr int64_t kChunk = kGroups * kGroup;
  // A weight is at most 15/8, a group four of them, and there are two halves.
  static constexpr int kMostExponent = 9;
  static_assert((2 * kGroups * 4 * 15 / 8) << kMostExponent <= 65504);

  static int64_t stride(int64_t columns) {
    return (columns + moe::kOperandAlign - 1) / moe::kOperandAlign * moe::kOperandAlign;
  }

  // Those of a row's groups, or null: one for all, to be multiplied by at the end.
  struct Scales {
    const float* scale;
    int64_t count;
    float largest;  // finite and not zero

    static Scales of(const float* scale, int64_t count) {
      const float most = largest_of(scale, count);
      return {scale, count, most > 0 ? most : 1.0f};
    }

    // Of the groups from `first` on, by the largest, as fp16.
    void take(int64_t first, uint16_t (&to)[kGroups]) const {
      __m128i halves = _mm_set1_epi16(0x3c00);  // 1
      if (scale != nullptr) {
        const int64_t left = count - first;
        const auto there = static_cast<__mmask8>(left < kGroups ? (1u << left) - 1 : 0xff);
        const __m256 values = _mm256_maskz_loadu_ps(there, scale + first);
        halves = _mm_castph_si128(_mm256_cvtxps_ph(_mm256_div_ps(values, _mm256_set1_ps(largest))));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
    }
  };

 public:
  // A row of floats, `columns` of them and zeros behind, becomes fp16 where it lies; behind it,
  // what a sum of products is to be multiplied by.
  static void finish_row(float* row, int64_t columns) {
    const int64_t count = stride(columns);
    const float power = power_for(largest_of(row, count));
    const V::F by = V::set(power);
    auto* to = reinterpret_cast<uint16_t*>(row);
    for (int64_t k = 0; k < count; k += V::kWidth) {
      _mm256_storeu_ph(to + k, _mm512_cvtxps_ph(V::mul(V::load(row + k), by)));
    }
    row[count / 2] = kUnit / power;
  }

  // As the shared body's Product, of rows that are finished.
  struct Product {
    const moe::Matrix& matrix;
    int64_t expert;
    int64_t k_begin;
    int64_t k_count;
    const float* const* x;
    int64_t tokens;

    void operator()(int64_t first, int64_t step, int64_t rows, int64_t jump, float* out) const {
      for (int64_t r = 0; r < rows;) {
        const int64_t count = alike(first + r * step, step, rows - r);
        multiply(first + r * step, step, count, r + count < rows ? 0 : jump, out + r);
        r += count;
      }
    }

   private:
    bool has_blocks() const { return (k_count - 1) >> matrix.scale_shift > 0; }

    // Of so many rows, those from `index` on that share the scales of its blocks.
    int64_t alike(int64_t index, int64_t step, int64_t rows) const {
      if (!has_blocks()) return rows;
      const int64_t block = matrix.scale_block_rows;
      const int64_t within = (index >= matrix.part_rows ? index - matrix.part_rows : index) % block;
      const int64_t count = (block - within + step - 1) / step;
      return count < rows ? count : rows;
    }

    void multiply(int64_t first, int64_t step, int64_t rows, int64_t jump, float* out) const {
      const Row one = row(matrix, expert, first, k_begin);
      Scales scales{};
      if (has_blocks()) scales = Scales::of(one.scale, ((k_count - 1) >> one.shift) + 1);
      const int64_t bytes = step * matrix.row_bytes;
      int64_t r = 0;
      const auto pass = [&]<int kCount>() {
        const PassesAhead ahead(kCount, bytes, k_count, rows, jump);
        for (; r + kCount <= rows; r += kCount) {
          over_tokens<kCount>(one.weight + r * bytes, bytes, scales, ahead.from(r), out + r);
        }
      };
      pass.template operator()<kRows>();
      pass.template operator()<1>();
      for (int64_t t = 0; t < tokens; ++t) {
        const float unit = x[t][stride(k_count) / 2];
        for (r = 0; r < rows; ++r) {
          const float scale = has_blocks()
                                  ? scales.largest
                                  : row(matrix, expert, first + r * step, k_begin).scale[0];
          float& to = out[t * moe::kRowBlock + r];
          to = to * scale * unit;
        }
      }
    }

    template <int kRows>
    void over_tokens(const uint8_t* w, int64_t row_bytes, const Scales& scales,
                     const PassAhead& ahead, float* out) const {
      int64_t t = 0;
      const auto next = [&]<int kTokens>() {
        const auto* const* from = reinterpret_cast<const uint16_t* const*>(x + t);
        float* to = out + t * moe::kRowBlock;
        if (t == 0) {
          dot<kRows, kTokens, true>(w, row_bytes, from, k_count, scales, ahead, to);
        } else {
          dot<kRows, kTokens, false>(w, row_bytes, from, k_count, scales, ahead, to);
        }
        t += kTokens;
      };
      while (t + 4 <= tokens) next.template operator()<4>();
      switch (tokens - t) {
        case 3:
          return next.template operator()<3>();
        case 2:
          return next.template operator()<2>();
        case 1:
          return next.template operator()<1>();
      }
    }
  };

 private:
  // The largest finite magnitude.
  static float largest_of(const float* x, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < count; k += V::kWidth) {
      const int64_t left = count - k;
      const auto there = static_cast<__mmask16>(left < V::kWidth ? (1u << left) - 1 : 0xffff);
      const __m512i size =
          _mm512_and_si512(_mm512_maskz_loadu_epi32(there, x + k), _mm512_set1_epi32(0x7fffffff));
      const __mmask16 finite = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x7f800000));
      most = _mm512_mask_max_epi32(most, finite, most, size);
    }
    return V::from_bits(static_cast<uint32_t>(_mm512_reduce_max_epi32(most)));
  }

  // The power of two that brings it below 2^kMostExponent.
  static float power_for(float most) {
    constexpr int kBias = 127;
    if (!(most > 1e-30f)) most = 1e-30f;
    const int exponent = static_cast<int>(V::to_bits(most) >> 23) - kBias;
    return V::from_bits(static_cast<uint32_t>(kBias + kMostExponent - 1 - exponent) << 23);
  }

  // Rows of weights `row_bytes` apart by kTokens rows of operands: each sum in the same order
  // whatever the number of either.
  template <int kRows, int kTokens, bool kPrefetch>
  static void dot(const uint8_t* w, int64_t row_bytes, const uint16_t* const* x, int64_t columns,
                  const Scales& scales, const PassAhead& ahead, float* out) {
    V::F sum[kRows][kTokens];
    for (int64_t k = 0; k < columns; k += kChunk) {
      const int64_t left = columns - k;
      add_chunk<kRows, kTokens, kPrefetch>(w + k, row_bytes, x, k, left < kChunk ? left : kChunk,
                                           scales, ahead, sum);
    }
    for (int t = 0; t < kTokens; ++t) {
      V::F column[kRows];
      for (int r = 0; r < kRows; ++r) column[r] = sum[r][t];
      V::sums(column, out + t * moe::kRowBlock);
    }
  }

  template <int kRows, int kTokens, bool kPrefetch>
  [[gnu::always_inline]] static void add_chunk(const uint8_t* w, int64_t row_bytes,
                                               const uint16_t* const* x, int64_t first,
                                               int64_t columns, const Scales& scales,
                                               const PassAhead& ahead,
                                               V::F (&sum)[kRows][kTokens]) {
    uint16_t scale[kGroups];
    scales.take(first / kGroup, scale);
    __m512h sums[kRows][kTokens];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sums[r][t] = _mm512_setzero_ph();
    }
    int64_t k = 0;
    for (; k + kGroup <= columns; k += kGroup) {
      if constexpr (kPrefetch) {
        const int64_t near[2] = {ahead.near_of(first + k), ahead.near_of(first + k + kLine)};
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const auto* at = reinterpret_cast<const std::byte*>(w + r * row_bytes + k);
          fetch_ahead(at, ahead.far, near[0]);
          fetch_ahead(at + kLine, ahead.far, near[1]);
        }
      }
      add_group<kRows, kTokens>(w + k, row_bytes, x, first + k, kGroup, scale[k / kGroup], sums);
    }
    if (k < columns) {
      add_group<kRows, kTokens>(w + k, row_bytes, x, first + k, columns - k, scale[k / kGroup],
                                sums);
    }
    const auto each = [&](const auto& take) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) take(sum[r][t], in_float(sums[r][t]));
      }
    };
    if (first == 0) {
      each([](V::F& to, V::F value) { to = value; });
    } else {
      each([](V::F& to, V::F value) { to = V::add(to, value); });
    }
  }

  // The sum of both halves.
  [[gnu::always_inline]] static V::F in_float(__m512h sums) {
    const __m512i both = _mm512_castph_si512(sums);
    const __m256h low = _mm256_castsi256_ph(_mm512_castsi512_si256(both));
    const __m256h high = _mm256_castsi256_ph(_mm512_extracti64x4_epi64(both, 1));
    return _mm512_cvtxph_ps(_mm256_add_ph(low, high));
  }

  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void add_group(const uint8_t* w, int64_t row_bytes,
                                               const uint16_t* const* x, int64_t k, int64_t left,
                                               uint16_t scale, __m512h (&sums)[kRows][kTokens]) {
    // As many rows in turns as keep their products in registers beside all sums.
    constexpr int kTurns = kRows * kTokens <= 8 ? kRows : 2;
    const __m512h by = _mm512_castsi512_ph(_mm512_set1_epi16(static_cast<int16_t>(scale)));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r += kTurns) {
      __m512h products[kTurns][kTokens];
      const uint8_t* rows = w + r * row_bytes;
      multiply_line<kTurns, kTokens, true>(rows, row_bytes, x, k, left, products);
      if (left > kLine) {
        multiply_line<kTurns, kTokens, false>(rows + kLine, row_bytes, x, k + kLine, left - kLine,
                                              products);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTurns; ++i) {
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          sums[r + i][t] = _mm512_fmadd_ph(products[i][t], by, sums[r + i][t]);
        }
      }
    }
  }

  template <int kRows, int kTokens, bool kFirst>
  [[gnu::always_inline]] static void multiply_line(const uint8_t* w, int64_t row_bytes,
                                                   const uint16_t* const* x, int64_t k,
                                                   int64_t left,
                                                   __m512h (&products)[kRows][kTokens]) {
    __m512i codes[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) codes[r] = load(w + r * row_bytes, left);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      __m512h weights[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) weights[r] = _mm512_castsi512_ph(halves(codes[r], odd));
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const __m512h v = _mm512_loadu_ph(x[t] + k + odd * (kLine / 2));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          auto& to = products[r][t];
          to = kFirst && odd == 0 ? _mm512_mul_ph(weights[r], v)
                                  : _mm512_fmadd_ph(weights[r], v, to);
        }
      }
    }
  }
};

}  // namespace
