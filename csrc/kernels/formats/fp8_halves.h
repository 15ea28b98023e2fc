// FP8 of fp8_words.h by float operands: floats by conversion, which knows subnormals (bits moved to
// a float's own places would be subnormal floats, and a product with one takes 250 times as long).
// The scale multiplies sums of 128 columns, not weights.
#pragma once

#include "kernels/formats/fp8_words.h"

namespace {

struct Fp8Halves : Fp8Words {
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 4;
  static constexpr int kChains = 4;
  static constexpr int64_t kStepBytes = 128;

  static const std::byte* address(const Row& row, int64_t k) { return Codes::address(row, k); }

  // Scales are for 128 columns at least.
  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void step(const Row* rows, const float* const* x, int64_t k,
                                          int64_t left, V::F (&sum)[kRows][kTokens]) {
    // As many rows in turns as keep their sums in registers: eight sums of products or so hide
    // the latency of a multiply-add.
    constexpr int kTurns = kRows * kTokens <= 8 ? kRows : 2;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r += kTurns) {
      multiply<kTurns, kTokens>(rows + r, x, k, left, sum + r);
    }
  }

 private:
  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void multiply(const Row* rows, const float* const* x, int64_t k,
                                              int64_t left, V::F (*sum)[kTokens]) {
    V::F products[kRows][kTokens];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) products[r][t] = V::zero();
    }
    multiply_line(rows, x, k, left, products);
    if (left > kLine) multiply_line(rows, x, k + kLine, left - kLine, products);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V::F scale = V::mul(V::set(V::kE4m3Scale), V::set(rows[r].scale[k >> rows[r].shift]));
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sum[r][t] = V::fma(products[r][t], scale, sum[r][t]);
    }
  }

  template <int kRows, int kTokens>
  [[gnu::always_inline]] static void multiply_line(const Row* rows, const float* const* x,
                                                   int64_t k, int64_t left,
                                                   V::F (&sum)[kRows][kTokens]) {
    __m512i codes[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) codes[r] = load(rows[r].weight + k, left);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      __m256i halves[kRows][2];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        split(Fp8Words::halves(codes[r], odd), halves[r]);
      }
#pragma GCC unroll 2
      for (int high = 0; high < 2; ++high) {
        V::F w[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          w[r] = _mm512_cvtph_ps(halves[r][high]);
        }
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const V::F v = V::load(x[t] + k + (2 * odd + high) * V::kWidth);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) sum[r][t] = V::fma(w[r], v, sum[r][t]);
        }
      }
    }
  }

  // Through memory, unknown to the compiler: an extraction would take the port of the conversions.
  [[gnu::always_inline]] static void split(__m512i whole, __m256i (&halves)[2]) {
    struct alignas(64) {
      __m256i half[2];
    } memory;
    _mm512_store_si512(&memory, whole);
    asm("" : "+m"(memory));
    halves[0] = _mm512_castsi512_si256(whole);
    halves[1] = memory.half[1];
  }
};

}  // namespace
