// INT8 of bytes.h by row_quads.h: a vector has 16 bytes that follow each other of each row, and a
// lane's sum is of every fourth four columns; a row's scale is the same for all.
#pragma once

#include "kernels/formats/bytes.h"
#include "kernels/formats/row_quads.h"

namespace {

struct Int8Quads : Bytes<moe::Format::kInt8> {
  static constexpr int64_t kBlockBytes = kQuadColumns;
  static constexpr int kCodes = 1;
  static constexpr int kParts = 1;
  static constexpr bool kHasZeros = false;
  static constexpr int kZero = 128;
  static constexpr float kUnit = 1.0f;
  static constexpr DigitOrder kOrder = [] {
    DigitOrder order{};
    for (int at = 0; at < kQuadColumns; ++at) {
      const int line = at / 64, vector = at / 16 % 4, byte = at % 16;
      const int place = vector % 2 * 2 + vector / 2;
      order.column[at] = static_cast<uint8_t>(64 * line + 16 * place + byte);
    }
    return order;
  }();

  // Of the 16 bytes of each row the first and the third, or the second and the last.
  [[gnu::always_inline]] static void pair(const __m512i (&rows)[4], int which, __m512i (&to)[2]) {
    const auto of = [&](__m512i a, __m512i b) {
      return which == 0 ? _mm512_shuffle_i32x4(a, b, 0x88) : _mm512_shuffle_i32x4(a, b, 0xdd);
    };
    const __m512i low = of(rows[0], rows[1]);
    const __m512i high = of(rows[2], rows[3]);
    to[0] = _mm512_shuffle_i32x4(low, high, 0x88);
    to[1] = _mm512_shuffle_i32x4(low, high, 0xdd);
  }

  // 128 more.
  [[gnu::always_inline]] static __m512i code(__m512i bytes, int) {
    return _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
  }

  [[gnu::always_inline]] static void scales(const Row* rows, int64_t, int64_t, V::F (&to)[1]) {
    const __m128 each = _mm_setr_ps(*rows[0].scale, *rows[1].scale, *rows[2].scale, *rows[3].scale);
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    to[0] = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(each));
  }
  template <class Do>
  static void choose(const moe::Matrix&, const Do& with) {
    with.template operator()<Int8Quads>();
  }
};

}  // namespace
