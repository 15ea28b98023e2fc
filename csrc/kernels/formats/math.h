// How floats multiply, and where a row's scales are. Include after the instruction set's vec.h.
//
// The formats' functions are inlined whatever the compiler thinks of their size: called, they
// return their results through memory. INT4 took half as long again for its vectors, and a short
// row of MXFP4 for its `Row`, which is written in pieces and read as one: no store forwards to
// that.
#pragma once

namespace {

inline const std::byte* weight_row(const moe::Matrix& m, int64_t expert, int64_t index) {
  return m.weight + expert * m.expert_bytes + index * m.row_bytes;
}

inline const std::byte* scale_row(const moe::Matrix& m, int64_t expert, int64_t index) {
  const int64_t part = index >= m.part_rows ? 1 : 0;
  int64_t block = index - part * m.part_rows;
  // Asked, because a division takes longer than unpacking a short row.
  if (m.scale_block_rows > 1) block /= m.scale_block_rows;
  return m.scale + expert * m.scale_expert_bytes +
         (part * m.scale_part_rows + block) * m.scale_row_bytes;
}

// Weights loaded as one vector of floats, by float operands in their natural order. kRows: weight
// rows that pass over four tokens together, as many as the registers hold. kStreamRows: rows in
// step where the tokens are few (see Product). kChains: sums in flight
// that hide the latency of multiply_add. arrange: puts kStep operands in the order of the weights,
// where operand k of a row is at position(k).
struct FloatMath {
  static constexpr int kRows = V::kRows;
  static constexpr int kStreamRows = 1;
  static constexpr int kChains = 8;
  using Operand = float;
  using Weights = V::F;
  static constexpr int64_t kStep = V::kWidth;
  static void arrange(float*) {}
  static V::F load_operand(const float* x) { return V::load(x); }
  static V::F multiply_add(V::F weights, V::F x, V::F sum) { return V::fma(weights, x, sum); }
  static int64_t position(int64_t k) { return k; }
};

// Weights loaded as two vectors.
struct PairMath {
  static constexpr int kRows = V::kRows;
  static constexpr int kStreamRows = V::kStreamRows;
  static constexpr int kChains = 8;
  using Operand = float;
  using Weights = V::Pair;
  static constexpr int64_t kStep = 2 * V::kWidth;
  static void arrange(float*) {}
  static V::Pair load_operand(const float* x) { return {V::load(x), V::load(x + V::kWidth)}; }
  static V::F multiply_add(V::Pair weights, V::Pair x, V::F sum) {
    return V::fma(weights.b, x.b, V::fma(weights.a, x.a, sum));
  }
  static int64_t position(int64_t k) { return k; }
};

// Two weights a byte: the low nibbles, which have even k, are one vector, the high nibbles the
// other. Operands are stored in that order, so that unpacking shuffles nothing.
struct NibbleMath : PairMath {
  static void arrange(float* x) {
    const V::Pair halves = V::deinterleave({V::load(x), V::load(x + V::kWidth)});
    V::store(x, halves.a);
    V::store(x + V::kWidth, halves.b);
  }
  static int64_t position(int64_t k) {
    const int64_t within = k % kStep;
    return k - within + within / 2 + within % 2 * V::kWidth;
  }
};

}  // namespace
