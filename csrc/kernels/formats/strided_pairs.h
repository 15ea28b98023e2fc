// Quantised weights by bf16 operands, two products an instruction (AVX512-BF16). Every code's value
// is exact in bf16; scales multiply the sums of their columns in float32.
//
// 64 bytes of weights are taken as 32 words of 16 bits, which a shift and a permutation turn into
// bf16 in place: nothing is widened or unpacked, for which Intel's cores have one port. So a vector
// holds every kParts-th column, and operands are stored in that order.
#pragma once

#include "kernels/formats/math.h"

namespace {

template <int kParts>
struct StridedPairs {
  static constexpr int kRows = 2;
  static constexpr int kStreamRows = 1;
  // Decoding takes longer than the one addition that sums wait for.
  static constexpr int kChains = 2;
  static constexpr int64_t kStep = 32 * kParts;
  static constexpr int64_t kStepBytes = 64;
  using Operand = moe::Bf16;
  // Part p has columns p, p + kParts, ...: lane i of their products' sums is columns
  // [2 kParts i, 2 kParts (i + 1)).
  struct Weights {
    __m512bh part[kParts];
    __m512 scale;
  };
  struct Operands {
    __m512bh part[kParts];
  };

  static int64_t position(int64_t k) {
    // Unsigned, remainders are single instructions.
    const uint64_t within = static_cast<uint64_t>(k) % kStep;
    return k + static_cast<int64_t>(within % kParts * 32 + within / kParts - within);
  }
  static void arrange(moe::Bf16* x) {
    moe::Bf16 natural[kStep];
    __builtin_memcpy(natural, x, sizeof natural);
    for (int p = 0; p < kParts; ++p) {
      for (int i = 0; i < 32; ++i) x[p * 32 + i] = natural[i * kParts + p];
    }
  }
  static Operands load_operand(const moe::Bf16* x) {
    Operands operands;
    for (int p = 0; p < kParts; ++p) operands.part[p] = (__m512bh)_mm512_loadu_si512(x + 32 * p);
    return operands;
  }
  static __m512 multiply_add(const Weights& w, const Operands& x, __m512 sum) {
    __m512 products = _mm512_setzero_ps();
    for (int p = 0; p < kParts; ++p) products = _mm512_dpbf16_ps(products, w.part[p], x.part[p]);
    return _mm512_fmadd_ps(products, w.scale, sum);
  }

 protected:
  static __m512i words(const void* weights) { return _mm512_loadu_si512(weights); }
  // At least one byte; zeros after them.
  static __m512i words(const void* weights, int64_t bytes) {
    return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (kStepBytes - bytes), weights);
  }
};

}  // namespace
