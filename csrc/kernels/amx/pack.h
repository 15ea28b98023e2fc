// The tokens' side of the products. Weights are the first operand, rows of 32 columns (see
// weights.h). The tokens are the second: for every 16 tokens and 32 columns a tile of 1 KiB,
// [column pair][token][2] bf16. Columns past the end and missing tokens are zero. Formats may put
// the 32 columns in another order than their own (W::column), the same on both sides.
#pragma once

#include "kernels/amx/tiles.h"

namespace {

// What is packed together: so many tiles of columns of a block, then the same of the next block.
// Products run over as many at a time, or a multiple (see body.h).
constexpr int64_t kPanelSteps = 8;

inline int64_t tile_steps(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

// Where the tile of a block of 16 tokens is in its group of `blocks`: panel after panel, so that
// what is used together lies together.
inline int64_t tile_offset(int64_t blocks, int64_t steps, int64_t block, int64_t step) {
  const int64_t panel = step / kPanelSteps * kPanelSteps;
  const int64_t width = steps - panel < kPanelSteps ? steps - panel : kPanelSteps;
  return (panel * blocks + block * width + step - panel) * kTileBytes;
}

// The packed tokens of a group.
struct Tokens {
  std::byte* packed;
  int64_t blocks;
  int64_t steps;

  std::byte* tile(int64_t block, int64_t step) const {
    return packed + tile_offset(blocks, steps, block, step);
  }
};

inline int64_t block_count(const moe::Group& group) { return (group.count + kTile - 1) / kTile; }

// Two vectors of floats to bf16 pairs: a in the low halves, b in the high ones.
inline __m512i bf16_pairs(__m512 a, __m512 b) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 16 vectors of 16 dwords, in place.
inline void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  // v[4g + c] now holds, for each 128-bit lane l, column 4l + c of rows 4g..4g+3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(v[c], v[c + 4], 0x88);
    const __m512i low23 = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(v[c], v[c + 4], 0xdd);
    const __m512i high23 = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[c + 8] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    t[c + 12] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

inline __m512i to_bf16_columns(const moe::Bf16* row) { return _mm512_loadu_si512(row); }
template <class Element>
inline __m512i to_bf16_columns(const Element* row) {
  return (__m512i)_mm512_cvtne2ps_pbh(V::load(row + kTile), V::load(row));
}

// 32 columns of one row as bf16; `count` of them are there.
template <class Element>
inline __m512i load_columns(const Element* row, int64_t count) {
  if (count == kTileColumns) return to_bf16_columns(row);
  alignas(64) Element buffer[kTileColumns] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = row[i];
  return to_bf16_columns(buffer);
}

template <class W, class Element>
inline void pack_tokens(const Element* source, const int32_t* tokens, int64_t count, int64_t width,
                        const Tokens& packed, int64_t block) {
  // Every core has read these lines in the call before, and gives them up one after another: they
  // are asked for a few tiles before they are written.
  constexpr int64_t kAheadSteps = 4;
  const auto ask = [&](int64_t step) {
    if (step >= packed.steps) return;
    const std::byte* tile = packed.tile(block, step);
    for (int64_t i = 0; i < kTile; ++i) __builtin_prefetch(tile + i * 64, 1);
  };
  for (int64_t step = 0; step < kAheadSteps; ++step) ask(step);
  for (int64_t step = 0; step < packed.steps; ++step) {
    ask(step + kAheadSteps);
    const int64_t k = step * kTileColumns;
    const int64_t columns = width - k < kTileColumns ? width - k : kTileColumns;
    __m512i rows[16];
    for (int64_t i = 0; i < kTile; ++i) {
      rows[i] = i < count
                    ? W::arrange_columns(load_columns(source + tokens[i] * width + k, columns))
                    : _mm512_setzero_si512();
    }
    transpose(rows);
    std::byte* to = packed.tile(block, step);
    for (int64_t i = 0; i < kTile; ++i) _mm512_store_si512(to + i * 64, rows[i]);
  }
}

// Block `block` of 16 tokens of a packed group, from the input rows.
template <class W>
void pack(const moe::Work& work, const moe::Group& group, int64_t block) {
  const moe::Layer& layer = *work.layer;
  const int64_t first = block * kTile;
  const int64_t count = group.count - first < kTile ? group.count - first : kTile;
  const int32_t* tokens = work.pair_token + group.begin + first;
  const int64_t steps = tile_steps(layer.hidden);
  const Tokens packed{work.packed_x + group.packed * steps * kTileBytes, block_count(group), steps};
  const auto pack_from = [&](const auto* source) {
    pack_tokens<W>(source, tokens, count, layer.hidden, packed, block);
  };
  switch (layer.dtype) {
    case moe::Dtype::kFp32:
      return pack_from(static_cast<const float*>(work.source));
    case moe::Dtype::kFp16:
      return pack_from(static_cast<const moe::Fp16*>(work.source));
    case moe::Dtype::kBf16:
      return pack_from(static_cast<const moe::Bf16*>(work.source));
  }
}

// 16 activated rows of one block to its packed inner rows. `value` is [row][token].
template <class W>
inline void store_inner(const moe::Work& work, const moe::Group& group, int64_t block, int64_t row,
                        int64_t rows, const float (&value)[kTile][kTile]) {
  const int64_t steps = tile_steps(work.inner_end - work.inner_begin);
  const int64_t column = row - work.inner_begin;
  std::byte* tile = work.packed_inner + group.packed * steps * kTileBytes +
                    tile_offset(block_count(group), steps, block, column / kTileColumns);
  const int64_t half = column % kTileColumns / kTile;
  // The tile's second half too, where the rows end in its first.
  const bool last = half == 0 && row + rows == work.inner_end;
  for (int64_t pair = 0; pair < kTile; ++pair) {
    const int64_t even = W::column(2 * pair);
    const int64_t odd = W::column(2 * pair + 1);
    const auto at = [&](int64_t c) {
      return c / kTile == half && c % kTile < rows ? _mm512_load_ps(value[c % kTile])
                                                   : _mm512_setzero_ps();
    };
    if (even / kTile == half || last) {
      _mm512_store_si512(tile + pair * 64, bf16_pairs(at(even), at(odd)));
    }
  }
}

}  // namespace
