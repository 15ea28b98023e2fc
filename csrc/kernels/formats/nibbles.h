// Two weights a byte, the even column in the low nibble:
// INT4  (q - 8) or (q - zero), times a scale of Scale type for each group of columns of a row;
// MXFP4 e2m1, times 2^(e - 127) for each 32 columns (OCP Microscaling Formats 1.0);
// NVFP4 e2m1, times an e4m3 scale for each 16 columns, times a float32 of the expert.
#pragma once

#include "kernels/formats/math.h"

namespace {

struct NibbleRow {
  const uint8_t* weight;
  const std::byte* scale;
  const std::byte* zero;
  int64_t shift;
  int64_t zero_bits;  // 0 or 4: where in a byte the row's zero points are
  float global;
};

struct Nibbles : NibbleMath {
  static constexpr int64_t kStepBytes = kStep / 2;
  using Row = NibbleRow;

  static const std::byte* address(const Row& row, int64_t k) {
    return reinterpret_cast<const std::byte*>(row.weight + k / 2);
  }

 protected:
  [[gnu::always_inline]] static Row base_row(const moe::Matrix& m, int64_t expert, int64_t index,
                                             int64_t k, int64_t scale_bytes) {
    return {reinterpret_cast<const uint8_t*>(weight_row(m, expert, index)) + k / 2,
            scale_row(m, expert, index) + (k >> m.scale_shift) * scale_bytes,
            nullptr,
            m.scale_shift,
            0,
            1.0f};
  }
  static const uint8_t* tail(const Row& row, int64_t k, int64_t count, uint8_t* buffer) {
    for (int64_t i = 0; i < kStepBytes; ++i) {
      buffer[i] = i < (count + 1) / 2 ? row.weight[k / 2 + i] : uint8_t{0};
    }
    return buffer;
  }
};

template <class Scale>
struct Int4 : Nibbles {
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    Row row = base_row(m, expert, index, k, sizeof(Scale));
    if (m.zero != nullptr) {
      const int64_t groups = m.scale_row_bytes / static_cast<int64_t>(sizeof(Scale));
      row.zero = m.zero + (expert * m.rows / 2 + index / 2) * groups + (k >> m.scale_shift);
      row.zero_bits = index % 2 * 4;
    }
    return row;
  }
  [[gnu::always_inline]] static V::Pair load(const Row& row, int64_t k) {
    return decode(row, row.weight + k / 2, k);
  }
  static V::Pair load_tail(const Row& row, int64_t k, int64_t count) {
    uint8_t buffer[kStepBytes];
    return decode(row, tail(row, k, count, buffer), k);
  }

 private:
  [[gnu::always_inline]] static V::Pair decode(const Row& row, const uint8_t* weights, int64_t k) {
    const int64_t group = k >> row.shift;
    const float scale = V::to_float(reinterpret_cast<const Scale*>(row.scale)[group]);
    const int zero =
        row.zero == nullptr ? 8 : static_cast<int>(row.zero[group]) >> row.zero_bits & 0xf;
    const V::F factor = V::set(scale);
    const V::F offset = V::set(-scale * static_cast<float>(zero));
    const V::Pair values = V::load_uint4(weights);
    return {V::fma(values.a, factor, offset), V::fma(values.b, factor, offset)};
  }
};

struct Mxfp4 : Nibbles {
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    return base_row(m, expert, index, k, 1);
  }
  [[gnu::always_inline]] static V::Pair load(const Row& row, int64_t k) {
    return decode(row, row.weight + k / 2, k);
  }
  static V::Pair load_tail(const Row& row, int64_t k, int64_t count) {
    uint8_t buffer[kStepBytes];
    return decode(row, tail(row, k, count, buffer), k);
  }

 private:
  [[gnu::always_inline]] static V::Pair decode(const Row& row, const uint8_t* weights, int64_t k) {
    const auto exponent = static_cast<uint32_t>(row.scale[k >> 5]);
    const V::F scale = V::set(V::from_bits(exponent << 23));
    const V::Pair values = V::load_e2m1(weights);
    return {V::mul(values.a, scale), V::mul(values.b, scale)};
  }
};

struct Nvfp4 : Nibbles {
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    Row row = base_row(m, expert, index, k, 1);
    const int64_t part = m.global_parts == 2 && index >= m.part_rows ? 1 : 0;
    row.global = m.global[expert * m.global_parts + part];
    return row;
  }
  [[gnu::always_inline]] static V::Pair load(const Row& row, int64_t k) {
    return decode(row, row.weight + k / 2, k, kStep);
  }
  static V::Pair load_tail(const Row& row, int64_t k, int64_t count) {
    uint8_t buffer[kStepBytes];
    return decode(row, tail(row, k, count, buffer), k, count);
  }

 protected:
  static float scale(const Row& row, int64_t k) {
    const auto code = static_cast<uint8_t>(row.scale[k >> 4]);
    return V::e4m3_to_float(code) * row.global;
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
