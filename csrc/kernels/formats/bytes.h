// One byte a weight: FP8 (e4m3) and INT8, with float32 scales for blocks of rows by columns:
// 128x128, a row (per-channel), or everything (per-tensor). The codes 0x7f and 0xff of e4m3 are NaN
// and do not occur in weights; they read as 480.
#pragma once

#include "kernels/formats/math.h"

namespace {

template <moe::Format kFormat>
struct Bytes : PairMath {
  static constexpr int64_t kStepBytes = kStep;

  struct Row {
    const uint8_t* weight;
    const float* scale;
    int64_t shift;
  };
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    return {reinterpret_cast<const uint8_t*>(weight_row(m, expert, index)) + k,
            reinterpret_cast<const float*>(scale_row(m, expert, index)) + (k >> m.scale_shift),
            m.scale_shift};
  }
  static const std::byte* address(const Row& row, int64_t k) {
    return reinterpret_cast<const std::byte*>(row.weight + k);
  }
  [[gnu::always_inline]] static V::Pair load(const Row& row, int64_t k) {
    return decode(row, row.weight + k, k);
  }
  static V::Pair load_tail(const Row& row, int64_t k, int64_t count) {
    uint8_t buffer[kStep] = {};
    for (int64_t i = 0; i < count; ++i) buffer[i] = row.weight[k + i];
    return decode(row, buffer, k);
  }

 private:
  [[gnu::always_inline]] static V::Pair decode(const Row& row, const uint8_t* weights, int64_t k) {
    const V::F scale = V::set(row.scale[k >> row.shift]);
    if constexpr (kFormat == moe::Format::kFp8) {
      const V::Pair values = V::load_e4m3(weights);
      const V::F shifted = V::mul(scale, V::set(V::kE4m3Scale));
      return {V::mul(values.a, shifted), V::mul(values.b, shifted)};
    } else {
      const V::Pair values = V::load_int8(reinterpret_cast<const int8_t*>(weights));
      return {V::mul(values.a, scale), V::mul(values.b, scale)};
    }
  }
};

}  // namespace
