// bf16 weights by bf16 operands, two products an instruction (AVX512-BF16). Accumulates in float32;
// subnormal operands count as zero.
#pragma once

#include "kernels/formats/math.h"

namespace {

struct Bf16Pairs {
  using Operand = moe::Bf16;
  using Weights = __m512bh;
  static constexpr int64_t kStep = 32;
  static constexpr int64_t kStepBytes = 64;
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 1;
  static constexpr int kChains = 8;
  static void arrange(moe::Bf16*) {}
  static int64_t position(int64_t k) { return k; }

  struct Row {
    const moe::Bf16* weight;
  };
  static Row row(const moe::Matrix& matrix, int64_t expert, int64_t index, int64_t k) {
    return {reinterpret_cast<const moe::Bf16*>(weight_row(matrix, expert, index)) + k};
  }
  static const std::byte* address(const Row& row, int64_t k) {
    return reinterpret_cast<const std::byte*>(row.weight + k);
  }
  static __m512bh load(const Row& row, int64_t k) { return load_operand(row.weight + k); }
  static __m512bh load_tail(const Row& row, int64_t k, int64_t count) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, row.weight + k);
  }
  static __m512bh load_operand(const moe::Bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static __m512 multiply_add(__m512bh weights, __m512bh x, __m512 sum) {
    return _mm512_dpbf16_ps(sum, weights, x);
  }
};

}  // namespace
