// FP8 of bytes.h as fp16 with AVX-512. A code's bits are an fp16's but for one shift, so 64 of them
// become fp16 where they lie, in two vectors of words, of 1/256 of their value.
//
// The words' high bytes are the odd columns: so operands are stored with column c of 64 at position
// c % 2 * 32 + c / 2.
#pragma once

#include "kernels/formats/bytes.h"

namespace {

struct Fp8Words {
  static constexpr int64_t kStep = 128;
  static constexpr int64_t kLine = 64;
  using Operand = float;
  using Codes = Bytes<moe::Format::kFp8>;
  using Row = Codes::Row;

  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    return Codes::row(m, expert, index, k);
  }

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

  // A line's codes, of which `left` are there, zeros after them.
  [[gnu::always_inline]] static __m512i load(const uint8_t* weights, int64_t left) {
    if (left >= kLine) return _mm512_loadu_si512(weights);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, weights);
  }

  // The even or the odd columns. Shifted by one, the sign comes twice: its copy is masked out.
  [[gnu::always_inline]] static __m512i halves(__m512i codes, int odd) {
    const __m512i high = odd == 0 ? _mm512_slli_epi16(codes, 8) : codes;
    return _mm512_and_si512(_mm512_srai_epi16(high, 1),
                            _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  }
};

}  // namespace
