// The weights' side of the products: rows of tiles, unpacked to bf16. A format W has `unpack`, the
// columns of one row to the rows of successive tiles, and the order that it leaves each 32 columns
// in; kIsTileRow: whether its rows are rows of tiles where they lie. Missing columns may hold
// anything finite: the tokens are zero there.
#pragma once

#include "kernels/amx/tiles.h"
#include "kernels/formats/bf16_pairs.h"
#include "kernels/formats/bytes.h"

namespace {

struct NaturalColumns {
  static constexpr int64_t column(int64_t position) { return position; }
  static __m512i arrange_columns(__m512i row) { return row; }
};

struct Bf16Tiles : Bf16Pairs, NaturalColumns {
  static constexpr bool kIsTileRow = true;
  static constexpr int64_t kPackedTokens = 8;
  static void unpack(const Row& row, int64_t columns, std::byte* to) {
    for (int64_t c = 0; c < columns; c += kTileColumns, to += kTileBytes) {
      const int64_t left = columns - c;
      _mm512_store_si512(to, (__m512i)(left < kStep ? load_tail(row, c, left) : load(row, c)));
    }
  }
};

template <moe::Format kFormat>
struct ByteTiles : Bytes<kFormat>, NaturalColumns {
  using W = Bytes<kFormat>;
  static constexpr bool kIsTileRow = false;
  static constexpr int64_t kPackedTokens = 8;
  static void unpack(const typename W::Row& row, int64_t columns, std::byte* to) {
    for (int64_t c = 0; c < columns; c += kTileColumns, to += kTileBytes) {
      const int64_t left = columns - c;
      const V::Pair pair = left < W::kStep ? W::load_tail(row, c, left) : W::load(row, c);
      _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(pair.b, pair.a));
    }
  }
};

}  // namespace
