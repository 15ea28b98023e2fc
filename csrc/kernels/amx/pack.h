// Operands for the tiles. Weights are the first operand, rows as they lie in memory, so that
// nothing about them has to be rearranged. The tokens are then the second, packed: for every 16
// tokens and 32 columns 1 KiB, [column pair][token][2] bf16. Columns past the end and missing
// tokens are zero.
#pragma once

#include "kernels/amx/tiles.h"

namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kTileColumns = 32;
constexpr int64_t kTileBytes = 1024;

inline int64_t tile_steps(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

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

template <class Element>
inline void pack_tokens(const Element* source, const int32_t* tokens, int64_t count, int64_t width,
                        std::byte* to) {
  for (int64_t k = 0; k < width; k += kTileColumns) {
    const int64_t columns = width - k < kTileColumns ? width - k : kTileColumns;
    __m512i rows[16];
    for (int64_t i = 0; i < kTile; ++i) {
      rows[i] = i < count ? load_columns(source + tokens[i] * width + k, columns)
                          : _mm512_setzero_si512();
    }
    transpose(rows);
    for (int64_t i = 0; i < kTile; ++i) _mm512_store_si512(to + i * 64, rows[i]);
    to += kTileBytes;
  }
}

// Block `block` of 16 tokens of a packed group, from the input rows.
void pack(const moe::Work& work, const moe::Group& group, int64_t block) {
  const moe::Layer& layer = *work.layer;
  const int64_t first = block * kTile;
  const int64_t count = group.count - first < kTile ? group.count - first : kTile;
  const int32_t* tokens = work.pair_token + group.begin + first;
  std::byte* to = work.packed_x + (group.packed + block) * tile_steps(layer.hidden) * kTileBytes;
  switch (layer.dtype) {
    case moe::Dtype::kFp32:
      return pack_tokens(static_cast<const float*>(work.source), tokens, count, layer.hidden, to);
    case moe::Dtype::kFp16:
      return pack_tokens(static_cast<const moe::Fp16*>(work.source), tokens, count, layer.hidden,
                         to);
    case moe::Dtype::kBf16:
      return pack_tokens(static_cast<const moe::Bf16*>(work.source), tokens, count, layer.hidden,
                         to);
  }
}

// `count` weight rows from `first`, `step` apart, over columns [k, k + columns), as bf16 in `to`,
// [16][stride bytes]: missing rows and columns zero.
template <class W>
inline void unpack_rows(const moe::Matrix& matrix, int64_t expert, int64_t first, int64_t step,
                        int64_t count, int64_t k, int64_t columns, std::byte* to, int64_t stride) {
  constexpr int64_t kAheadBytes = 2048;
  for (int64_t r = 0; r < kTile; ++r) {
    std::byte* at = to + r * stride;
    if (r >= count) {
      __builtin_memset(at, 0, static_cast<size_t>(stride));
      continue;
    }
    const auto row = W::row(matrix, expert, first + r * step, k);
    for (int64_t c = 0; c < columns; c += kTileColumns, at += 64) {
      const int64_t left = columns - c;
      __builtin_prefetch(W::address(row, c) + kAheadBytes);
      _mm512_store_si512(at, W::load_bf16(row, c, left < kTileColumns ? left : kTileColumns));
    }
  }
}

}  // namespace
