// Unquantised weights: fp32, fp16, bf16.
#pragma once

#include "kernels/formats/math.h"

namespace {

template <class Element>
struct Plain : FloatMath {
  static constexpr int64_t kStepBytes = kStep * sizeof(Element);

  struct Row {
    const Element* weight;
  };
  static Row row(const moe::Matrix& matrix, int64_t expert, int64_t index, int64_t k) {
    return {reinterpret_cast<const Element*>(weight_row(matrix, expert, index)) + k};
  }
  static const std::byte* address(const Row& row, int64_t k) {
    return reinterpret_cast<const std::byte*>(row.weight + k);
  }
  static V::F load(const Row& row, int64_t k) { return V::load(row.weight + k); }
  // `count` weights, zeros after them; reads nothing past them.
  static V::F load_tail(const Row& row, int64_t k, int64_t count) {
    Element buffer[V::kWidth] = {};
    for (int64_t i = 0; i < count; ++i) buffer[i] = row.weight[k + i];
    return V::load(buffer);
  }
};

}  // namespace
