// FP8 of bytes.h by float operands with AVX-512. A code's bits are an fp16's but for one shift, so
// 64 of them become fp16 where they lie, in two vectors of words, and floats by conversion, which
// knows subnormals (bits moved to a float's own places would be subnormal floats, and a product
// with one takes 250 times as long). The scale multiplies sums of 128 columns, not weights.
//
// The words' high bytes are the odd columns, and a conversion takes half a vector: so operands are
// stored with column c of 64 at position c % 2 * 32 + c / 2.
#pragma once

#include "kernels/formats/bytes.h"

namespace {

struct Fp8Halves {
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 4;
  static constexpr int kChains = 4;
  static constexpr int64_t kStep = 128;
  static constexpr int64_t kStepBytes = 128;
  using Operand = float;
  using Codes = Bytes<moe::Format::kFp8>;
  using Row = Codes::Row;

  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    return Codes::row(m, expert, index, k);
  }
  static const std::byte* address(const Row& row, int64_t k) { return Codes::address(row, k); }

  static int64_t position(int64_t k) {
    const int64_t column = k % kLine;
    return k - column + column % 2 * (kLine / 2) + column / 2;
  }
  static void arrange(float* x) {
    for (int64_t k = 0; k < kStep; k += kLine) {
      const V::Pair low = V::deinterleave({V::load(x + k), V::load(x + k + V::kWidth)});
      const V::Pair high =
          V::deinterleave({V::load(x + k + 2 * V::kWidth), V::load(x + k + 3 * V::kWidth)});
      V::store(x + k, low.a);
      V::store(x + k + V::kWidth, high.a);
      V::store(x + k + 2 * V::kWidth, low.b);
      V::store(x + k + 3 * V::kWidth, high.b);
    }
  }

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
  static constexpr int64_t kLine = 64;

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
    for (int r = 0; r < kRows; ++r) codes[r] = load(rows[r], k, left);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      __m256i halves[kRows][2];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        split(to_halves(odd == 0 ? _mm512_slli_epi16(codes[r], 8) : codes[r]), halves[r]);
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

  [[gnu::always_inline]] static __m512i load(const Row& row, int64_t k, int64_t left) {
    if (left >= kLine) return _mm512_loadu_si512(row.weight + k);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, row.weight + k);
  }

  // Of codes in the high bytes. Shifted by one, the sign comes twice: its copy is masked out.
  [[gnu::always_inline]] static __m512i to_halves(__m512i codes) {
    return _mm512_and_si512(_mm512_srai_epi16(codes, 1),
                            _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  }
};

}  // namespace
