// INT8 as rows of 8-bit tiles: the codes are what a tile multiplies, in their order.
#pragma once

#include "kernels/amx/digits.h"
#include "kernels/formats/bytes.h"

namespace {

struct Int8Codes : Bytes<moe::Format::kInt8> {
  static constexpr int64_t kBits = 8;
  static constexpr ByteIndices kOrder = low_bytes([](int i) { return i; });
  static constexpr int kShift = 7;
  static constexpr float kUnit = 1.0f;

  [[gnu::always_inline]] static __m512i codes(const Row& row, int64_t k, int64_t left) {
    if (left >= kCodeColumns) return _mm512_loadu_si512(row.weight + k);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, row.weight + k);
  }
  // A row's, for as many lines as are asked for at most.
  static void scales(const Row& row, int64_t, int64_t, float* to) {
    V::store(to, V::set(row.scale[0]));
  }
  template <class Do>
  static auto choose(const moe::Matrix&, const Do& with) {
    return with.template operator()<Int8Codes>();
  }
};

}  // namespace
