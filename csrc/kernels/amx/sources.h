// Where tiles of weights come from: the weights themselves (bf16), or rows unpacked to bf16.
#pragma once

#include "kernels/formats/bf16_pairs.h"
#include "kernels/formats/math.h"

namespace {

struct Bf16Tiles : Bf16Pairs {
  static constexpr bool kInPlace = true;
  static __m512i load_bf16(const Row& row, int64_t k, int64_t count) {
    return (__m512i)(count < kStep ? load_tail(row, k, count) : load(row, k));
  }
};

template <class W>
struct UnpackedTiles : W {
  static constexpr bool kInPlace = false;
  // 32 columns in their natural order; `count` of them are there.
  static __m512i load_bf16(const typename W::Row& row, int64_t k, int64_t count) {
    const V::Pair pair = count < W::kStep ? W::load_tail(row, k, count) : W::load(row, k);
    if constexpr (W::kDeinterleaved) return bf16_pairs(pair.a, pair.b);
    return (__m512i)_mm512_cvtne2ps_pbh(pair.b, pair.a);
  }
};

}  // namespace
