// The formats of nibble_rows.h by float operands.
#pragma once

#include "kernels/formats/nibble_rows.h"

namespace {

// R gives rows. The low nibbles of a step come as one vector, the high nibbles as another, see
// NibbleMath.
template <class R>
struct Nibbles : NibbleMath, R {
  static constexpr int64_t kStepBytes = kStep / 2;

 protected:
  static const uint8_t* tail(const NibbleRow& row, int64_t k, int64_t count, uint8_t* buffer) {
    for (int64_t i = 0; i < kStepBytes; ++i) {
      buffer[i] = i < (count + 1) / 2 ? row.weight[k / 2 + i] : uint8_t{0};
    }
    return buffer;
  }
};

template <class Scale>
struct Int4 : Nibbles<Int4Rows<Scale>> {
  using Rows = Nibbles<Int4Rows<Scale>>;
  [[gnu::always_inline]] static V::Pair load(const NibbleRow& row, int64_t k) {
    return decode(row, row.weight + k / 2, k);
  }
  static V::Pair load_tail(const NibbleRow& row, int64_t k, int64_t count) {
    uint8_t buffer[Rows::kStepBytes];
    return decode(row, Rows::tail(row, k, count, buffer), k);
  }

 private:
  [[gnu::always_inline]] static V::Pair decode(const NibbleRow& row, const uint8_t* weights,
                                               int64_t k) {
    const int64_t group = k >> row.shift;
    const float scale = Rows::scale(row, group);
    const V::F factor = V::set(scale);
    const V::F offset = V::set(-scale * static_cast<float>(Rows::zero(row, group)));
    const V::Pair values = V::load_uint4(weights);
    return {V::fma(values.a, factor, offset), V::fma(values.b, factor, offset)};
  }
};

struct Mxfp4 : Nibbles<Mxfp4Rows> {
  [[gnu::always_inline]] static V::Pair load(const Row& row, int64_t k) {
    return decode(row, row.weight + k / 2, k);
  }
  static V::Pair load_tail(const Row& row, int64_t k, int64_t count) {
    uint8_t buffer[kStepBytes];
    return decode(row, tail(row, k, count, buffer), k);
  }

 private:
  [[gnu::always_inline]] static V::Pair decode(const Row& row, const uint8_t* weights, int64_t k) {
    const V::F factor = V::set(scale(row, k));
    const V::Pair values = V::load_e2m1(weights);
    return {V::mul(values.a, factor), V::mul(values.b, factor)};
  }
};

struct Nvfp4 : Nibbles<Nvfp4Rows> {
  [[gnu::always_inline]] static V::Pair load(const Row& row, int64_t k) {
    return decode(row, row.weight + k / 2, k, kStep);
  }
  static V::Pair load_tail(const Row& row, int64_t k, int64_t count) {
    uint8_t buffer[kStepBytes];
    return decode(row, tail(row, k, count, buffer), k, count);
  }

 private:
  [[gnu::always_inline]] static V::Pair decode(const Row& row, const uint8_t* weights, int64_t k,
                                               int64_t count) {
    const V::Pair values = V::load_e2m1(weights);
    V::F scales = V::set(scale(row, k));
    if constexpr (kStep > 16) {
      // The first half of either vector belongs to the first 16 columns.
      scales = V::join_halves(scales, V::set(count > 16 ? scale(row, k + 16) : 0.0f));
    }
    return {V::mul(values.a, scales), V::mul(values.b, scales)};
  }
};

}  // namespace
