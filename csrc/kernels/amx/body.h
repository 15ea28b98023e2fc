// Groups of many tokens by AMX tiles; the others by the kernels of the shared body (Small).
// W has load_bf16 (pack.h) and may allow tiles to be loaded from the weights themselves.
#pragma once

#include "kernels/amx/pack.h"
#include "kernels/body.h"

namespace {

// Below this many tokens the shared body streams weights as fast as memory gives them.
constexpr int64_t kPackedTokens = 8;
// Packed tokens that pass over the same rows while those stay in a 2 MiB L2.
constexpr int64_t kPackedBytes = int64_t{1} << 20;

// Two row tiles of one weight matrix or, gate and up, of two halves of it.
template <class W>
struct TilePair {
  TileRows first;
  TileRows second;
  Ahead ahead;  // the pair that comes next in memory

  // `rows1` 0: the second tile is a copy whose results nobody reads.
  TilePair(const moe::Matrix& matrix, int64_t expert, int64_t row0, int64_t rows0, int64_t row1,
           int64_t rows1, int64_t step, int64_t k, int64_t columns, std::byte* buffer) {
    const auto weights = W::row(matrix, expert, row0, k);
    const std::byte* const from = W::address(weights, 0);
    const int64_t between = rows1 > 0 ? (row1 - row0) * matrix.row_bytes : 0;
    const int64_t stride = step * matrix.row_bytes;
    const std::byte* const next = from + (row1 == row0 + kTile ? 2 * kTile : kTile) * stride;
    ahead = {.first = {next, stride},
             .second = {next + between, stride},
             .lines = (W::address(weights, columns) - from + 63) / 64,
             .line = 0,
             .every = 1};
    const bool whole = rows0 == kTile && (rows1 == kTile || rows1 == 0);
    if (W::kInPlace && whole && columns % kTileColumns == 0) {
      first = {from, stride};
      second = {from + between, stride};
      return;
    }
    const int64_t unpacked = tile_steps(columns) * 64;
    unpack_rows<W>(matrix, expert, row0, step, rows0, k, columns, buffer, unpacked);
    first = {buffer, unpacked};
    second = first;
    if (rows1 > 0) {
      second.base = buffer + kTile * unpacked;
      unpack_rows<W>(matrix, expert, row1, step, rows1, k, columns, buffer + kTile * unpacked,
                     unpacked);
    }
  }
};

// Calls done(block, quarters) for tokens in pairs of packed blocks [begin, end).
template <class W, class Done>
inline void over_blocks(const TilePair<W>& rows, const std::byte* packed, int64_t steps,
                        int64_t begin, int64_t end, const Done& done) {
  Quarters quarters;
  Ahead ahead = rows.ahead;
  ahead.every = (end - begin + 1) / 2;
  for (int64_t block = begin; block < end; block += 2, ++ahead.line) {
    const std::byte* b0 = packed + block * steps * kTileBytes;
    const std::byte* b1 = block + 1 < end ? b0 + steps * kTileBytes : b0;
    multiply(rows.first, rows.second, b0, b1, steps, ahead, quarters);
    done(block, quarters);
  }
}

inline int64_t blocks_at_a_time(int64_t steps) {
  const int64_t blocks = kPackedBytes / (steps * kTileBytes) / 2 * 2;
  return blocks < 2 ? 2 : blocks;
}

// 16 activated rows of one block to its packed inner rows. `value` is [row][token].
inline void store_inner(const moe::Work& work, int64_t block, int64_t row, int64_t rows,
                        const float (&value)[kTile][kTile]) {
  const int64_t columns = work.inner_end - work.inner_begin;
  const int64_t column = row - work.inner_begin;
  std::byte* tile =
      work.packed_inner + (block * tile_steps(columns) + column / kTileColumns) * kTileBytes;
  std::byte* at = tile + column % kTileColumns / 2 * 64;
  for (int64_t r = 0; r < kTile; r += 2, at += 64) {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 even = r < rows ? _mm512_load_ps(value[r]) : zero;
    const __m512 odd = r + 1 < rows ? _mm512_load_ps(value[r + 1]) : zero;
    _mm512_store_si512(at, bf16_pairs(even, odd));
  }
  // The last tile's second half, where the rows end in its first.
  if (row + rows == work.inner_end && column % kTileColumns < kTile) {
    for (; at < tile + kTileBytes; at += 64) _mm512_store_si512(at, _mm512_setzero_si512());
  }
}

template <class W>
void up_packed(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
               std::byte* buffer) {
  const moe::Layer& layer = *work.layer;
  const int64_t steps = tile_steps(layer.hidden);
  const std::byte* packed = work.packed_x + group.packed * steps * kTileBytes;
  const int64_t blocks = (group.count + kTile - 1) / kTile;
  const int64_t at_a_time = blocks_at_a_time(steps);
  const int64_t step = layer.interleaved ? 2 : 1;
  const int64_t unit = layer.gated ? kTile : 2 * kTile;
  [[maybe_unused]] const TileScope scope;
  alignas(64) float first_bias[kRowBlock] = {};
  alignas(64) float second_bias[kRowBlock] = {};

  for (int64_t from = 0; from < blocks; from += at_a_time) {
    const int64_t to = min_of(from + at_a_time, blocks);
    for (int64_t row = begin; row < end; row += unit) {
      const int64_t rows = min_of(kTile, end - row);
      const int64_t first = row * step;
      int64_t second = layer.interleaved ? first + 1 : layer.intermediate + row;
      int64_t second_rows = rows;
      if (!layer.gated) {
        second = row + kTile;
        second_rows = second < end ? min_of(kTile, end - second) : 0;
      }
      load_bias(layer, layer.w13, group.expert, first, step, rows, first_bias);
      load_bias(layer, layer.w13, group.expert, second, step, second_rows, second_bias);
      const TilePair<W> weights(layer.w13, group.expert, first, rows, second, second_rows, step, 0,
                                layer.hidden, buffer);
      over_blocks<W>(weights, packed, steps, from, to, [&](int64_t block, Quarters& q) {
        for (int64_t b = block; b < min_of(block + 2, to); ++b) {
          auto& gate = q.value[0][b - block];
          auto& up = q.value[1][b - block];
          const int64_t pair = group.begin + b * kTile;
          const auto tokens =
              static_cast<__mmask16>((1u << min_of(kTile, group.count - b * kTile)) - 1);
          const V::F scale = layer.router_weight_on_input
                                 ? _mm512_maskz_loadu_ps(tokens, work.pair_weight + pair)
                                 : V::set(1.0f);
          for (int64_t r = 0; r < kTile; ++r) {
            const V::F a = V::fma(V::load(gate[r]), scale, V::set(first_bias[r]));
            const V::F c = V::fma(V::load(up[r]), scale, V::set(second_bias[r]));
            V::store(gate[r], layer.gated ? activate(layer, a, c) : activate_gate(layer, a));
            if (!layer.gated) V::store(up[r], activate_gate(layer, c));
          }
          store_inner(work, group.packed + b, row, rows, gate);
          if (!layer.gated && second_rows > 0) {
            store_inner(work, group.packed + b, second, second_rows, up);
          }
        }
      });
    }
  }
}

// Adds 16 rows of one block, [row][token], to the tokens' sums.
inline void add_tile(const moe::Work& work, int64_t pair, int64_t tokens, int64_t row, int64_t rows,
                     const float* bias, const float (&value)[kTile][kTile]) {
  const moe::Layer& layer = *work.layer;
  __m512i lanes[16];
  for (int64_t r = 0; r < kTile; ++r) lanes[r] = _mm512_load_si512(value[r]);
  transpose(lanes);
  const auto mask = static_cast<__mmask16>((1u << rows) - 1);
  const __m512 biases = _mm512_load_ps(bias);
  for (int64_t t = 0; t < tokens; ++t) {
    const float weight = layer.router_weight_on_input ? 1.0f : work.pair_weight[pair + t];
    float* sums = work.sums + work.pair_token[pair + t] * layer.hidden + row;
    const __m512 term = _mm512_add_ps(_mm512_castsi512_ps(lanes[t]), biases);
    const __m512 sum = _mm512_maskz_loadu_ps(mask, sums);
    _mm512_mask_storeu_ps(sums, mask, _mm512_fmadd_ps(_mm512_set1_ps(weight), term, sum));
  }
}

template <class W>
void down_packed(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
                 std::byte* buffer) {
  const moe::Layer& layer = *work.layer;
  const int64_t columns = work.inner_end - work.inner_begin;
  const int64_t steps = tile_steps(columns);
  const std::byte* packed = work.packed_inner + group.packed * steps * kTileBytes;
  const int64_t blocks = (group.count + kTile - 1) / kTile;
  const int64_t at_a_time = blocks_at_a_time(steps);
  [[maybe_unused]] const TileScope scope;
  alignas(64) float bias[2 * kTile] = {};

  for (int64_t from = 0; from < blocks; from += at_a_time) {
    const int64_t to = min_of(from + at_a_time, blocks);
    for (int64_t row = begin; row < end; row += 2 * kTile) {
      const int64_t rows = min_of(kTile, end - row);
      const int64_t second = row + kTile;
      const int64_t second_rows = second < end ? min_of(kTile, end - second) : 0;
      if (work.inner_begin == 0) {
        load_bias(layer, layer.w2, group.expert, row, 1, rows + second_rows, bias);
      }
      const TilePair<W> weights(layer.w2, group.expert, row, rows, second, second_rows, 1,
                                work.inner_begin, columns, buffer);
      over_blocks<W>(weights, packed, steps, from, to, [&](int64_t block, Quarters& q) {
        for (int64_t b = block; b < min_of(block + 2, to); ++b) {
          const int64_t pair = group.begin + b * kTile;
          const int64_t tokens = min_of(kTile, group.count - b * kTile);
          add_tile(work, pair, tokens, row, rows, bias, q.value[0][b - block]);
          if (second_rows > 0) {
            add_tile(work, pair, tokens, second, second_rows, bias + kTile, q.value[1][b - block]);
          }
        }
      });
    }
  }
}

template <class Small, class W>
void up_either(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
               std::byte* buffer) {
  if (group.packed < 0) return up<Small>(work, group, begin, end, buffer);
  up_packed<W>(work, group, begin, end, buffer);
}

template <class Small, class W>
void down_either(const moe::Work& work, int64_t begin, int64_t end, std::byte* buffer) {
  clear_sums(work, begin, end);
  for (int64_t g = 0; g < work.group_count; ++g) {
    const moe::Group& group = work.groups[g];
    if (group.packed < 0) {
      down_group<Small>(work, group, begin, end);
    } else {
      down_packed<W>(work, group, begin, end, buffer);
    }
  }
  round_sums(work, begin, end);
}

// Bytes a thread needs for two unpacked tiles of rows.
inline int64_t buffer_bytes(const moe::Layer& layer) {
  const int64_t columns = layer.hidden > layer.intermediate ? layer.hidden : layer.intermediate;
  return 2 * kTile * tile_steps(columns) * 64;
}

template <class Small, class W>
constexpr moe::Kernels kTileKernels{sizeof(typename Small::Operand),
                                    prepare<Small>,
                                    up_either<Small, W>,
                                    down_either<Small, W>,
                                    kPackedTokens,
                                    pack,
                                    buffer_bytes};

}  // namespace
