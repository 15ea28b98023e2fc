// Two weights a byte, the even column in the low nibble, and where a row's are:
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

struct NibbleRows {
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
};

template <class Scale>
struct Int4Rows : NibbleRows {
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

 protected:
  [[gnu::always_inline]] static float scale(const Row& row, int64_t group) {
    return V::to_float(reinterpret_cast<const Scale*>(row.scale)[group]);
  }
  [[gnu::always_inline]] static int zero(const Row& row, int64_t group) {
    return row.zero == nullptr ? 8 : stored_zero(row, group);
  }
  // Where there are any.
  [[gnu::always_inline]] static int stored_zero(const Row& row, int64_t group) {
    return static_cast<int>(row.zero[group]) >> row.zero_bits & 0xf;
  }
};

struct Mxfp4Rows : NibbleRows {
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    return base_row(m, expert, index, k, 1);
  }

 protected:
  [[gnu::always_inline]] static float scale(const Row& row, int64_t k) {
    return V::from_bits(static_cast<uint32_t>(row.scale[k >> 5]) << 23);
  }
};

struct Nvfp4Rows : NibbleRows {
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    Row row = base_row(m, expert, index, k, 1);
    row.global = m.global[expert];
    return row;
  }

 protected:
  [[gnu::always_inline]] static float scale(const Row& row, int64_t k) {
    return V::e4m3_to_float(static_cast<uint8_t>(row.scale[k >> 4])) * row.global;
  }
};

}  // namespace
