// Groups of many tokens by AMX tiles; the others by the kernels of the shared body (Small).
//
// A task's product is weight rows by a group's tokens, [rows][tokens]. Registers hold 2 tiles of
// rows by 2 of tokens, so that four products (64 cycles) share four loads. Columns are taken a
// panel at a time, and all pairs of row tiles pass over a panel before the next one's turn: its
// tokens come from the cache that the cores share once a task, and from L2 afterwards. (All the
// tokens' columns, where they are a MiB, do not stay in 2 MiB beside the weights: products then
// took six times as long as the tiles do.) How wide a panel is: few tokens: memory is the limit,
// and reads fastest what is contiguous, so each row is unpacked
//   for 2048 columns; the 128 KiB that two tiles become lie in L2, from where they are used once or
//   twice;
// more: 256 columns, 16 KiB unpacked, which stay in L1 (48 KiB) while all tokens pass over them,
//   which come at 8 KiB for 512 cycles of products.
// Weights are read from memory once for kChunkBlocks of tokens.
//
// Up to four blocks of tokens, bf16 is not unpacked: its tiles are loaded from the rows where they
// lie, once or, from L2, twice (64 tokens, 16 threads at once: 87 GB/s of weights, unpacked 71).
#pragma once

#include "kernels/amx/multiply.h"
#include "kernels/body.h"

namespace {

constexpr int64_t kPanelColumns = kPanelSteps * kTileColumns;
constexpr int64_t kWidePanelColumns = 8 * kPanelColumns;
// The most blocks of tokens for which panels are wide.
constexpr int64_t kWidePanelBlocks = 4;
// The most blocks of tokens for which tiles are loaded where they lie.
constexpr int64_t kInPlaceBlocks = 4;
// Blocks of tokens for one reading of the weights.
constexpr int64_t kChunkBlocks = 32;
// Columns of a row that are unpacked in one turn of fetching ahead, which is as long as a step of
// products or two.
constexpr int64_t kTurnColumns = 512;
// Results that stay in L2 from one panel to the next: 512 KiB.
constexpr int64_t kResults = 256;

// A thread's buffer.
struct Buffer {
  std::byte panel[2][kWidePanelColumns / kTileColumns * kTileBytes];
  Result results[kResults];
};

// Rows `first`, `first + step`, ... for the first tile, likewise for the second.
struct TilePair {
  int64_t first;
  int64_t first_rows;
  int64_t second;
  int64_t second_rows;  // 0: nobody reads the second tile's results
};

// Row tiles of one expert's matrix.
struct Place {
  int64_t expert;
  TilePair pair;
};

// The weights of one product: `pair_at` gives pair i of row tiles; `following` is what the thread
// multiplies by after the last one, as far as is known.
template <class W, class PairAt>
struct Rows {
  const moe::Matrix& matrix;
  int64_t expert;
  int64_t step;  // between a tile's rows
  int64_t k_begin;
  int64_t columns;
  int64_t pairs;
  const PairAt& pair_at;
  Place following;

  Place place(int64_t i) const { return i < pairs ? Place{expert, pair_at(i)} : following; }

  // The rows' columns [panel, panel + width), unpacked.
  RowTiles unpack(const TilePair& pair, int64_t panel, int64_t width, Ahead& ahead,
                  TokensAhead& tokens, Buffer& buffer) const {
    unpack_tile(pair.first, pair.first_rows, panel, width, ahead, tokens, buffer.panel[0]);
    unpack_tile(pair.second, pair.second_rows, panel, width, ahead, tokens, buffer.panel[1]);
    return {buffer.panel[0], buffer.panel[1], 64, kTileBytes};
  }

  // Whether all columns of the rows are whole tiles where they lie.
  bool are_tiles(const TilePair& pair) const {
    return W::kIsTileRow && columns % kTileColumns == 0 && pair.first_rows == kTile &&
           pair.second_rows == kTile;
  }
  RowTiles in_place(const TilePair& pair) const {
    return {address(expert, pair.first, 0), address(expert, pair.second, 0),
            step * matrix.row_bytes, kTileColumns * static_cast<int64_t>(sizeof(moe::Bf16))};
  }

  // The columns [panel, panel + width), to be fetched in so many turns.
  Ahead ahead(const Place& of, int64_t panel, int64_t width, int64_t turns) const {
    const std::byte* first = address(of.expert, of.pair.first, panel);
    return Ahead(first, first + (of.pair.second - of.pair.first) * matrix.row_bytes,
                 step * matrix.row_bytes, address(of.expert, of.pair.first, panel, width) - first,
                 turns);
  }

 private:
  const std::byte* address(int64_t of, int64_t row, int64_t panel, int64_t column = 0) const {
    return W::address(W::row(matrix, of, row, k_begin + panel), column);
  }

  void unpack_tile(int64_t first, int64_t rows, int64_t panel, int64_t count, Ahead& ahead,
                   TokensAhead& tokens, std::byte* to) const {
    typename W::State state;
    for (int64_t r = 0; r < kTile; ++r, to += 64) {
      for (int64_t c = 0; c < count; c += kTurnColumns) {
        ahead.fetch();
        tokens.fetch();
        const int64_t part = min_of(kTurnColumns, count - c);
        std::byte* at = to + c / kTileColumns * kTileBytes;
        if (r < rows) {
          W::unpack(W::row(matrix, expert, first + r * step, k_begin + panel + c), part, at, state);
        } else {
          for (int64_t s = 0; s < tile_steps(part); ++s) {
            _mm512_store_si512(at + s * kTileBytes, _mm512_setzero_si512());
          }
        }
      }
    }
  }
};

// The pair i of row tiles by all the tokens, from where the rows lie; the next pair's are fetched.
template <class W, class PairAt>
inline void multiply_in_place(const Rows<W, PairAt>& rows, int64_t i, const Tokens& tokens,
                              Result* results) {
  const int64_t turns = (tokens.blocks + 1) / 2 * tokens.steps;
  Ahead ahead = rows.ahead(rows.place(i + 1), 0, rows.columns, turns);
  multiply_panel(rows.in_place(rows.pair_at(i)), tokens, 0, tokens.blocks, 0, tokens.steps, ahead,
                 results);
}

// Multiplies by the packed tokens of a group and calls done(i, from, to, results) for each pair of
// row tiles, with a result for each block in [from, to).
template <class W, class PairAt, class Done>
inline void multiply_rows(const Rows<W, PairAt>& rows, const Tokens& tokens, std::byte* memory,
                          const Done& done) {
  Buffer& buffer = *reinterpret_cast<Buffer*>(memory);
  int64_t first = 0;
  if (tokens.blocks <= kInPlaceBlocks) {
    for (; first < rows.pairs && rows.are_tiles(rows.pair_at(first)); ++first) {
      multiply_in_place(rows, first, tokens, buffer.results);
      done(first, 0, tokens.blocks, buffer.results);
    }
  }
  for (int64_t from = 0; from < tokens.blocks; from += kChunkBlocks) {
    const int64_t to = min_of(from + kChunkBlocks, tokens.blocks);
    const int64_t blocks = to - from;
    const int64_t panel_columns = blocks <= kWidePanelBlocks ? kWidePanelColumns : kPanelColumns;
    const int64_t sharing = kResults / blocks;
    for (int64_t begin = first; begin < rows.pairs; begin += sharing) {
      const int64_t end = min_of(begin + sharing, rows.pairs);
      for (int64_t panel = 0; panel < rows.columns; panel += panel_columns) {
        const int64_t width = min_of(panel_columns, rows.columns - panel);
        const int64_t steps = tile_steps(width);
        const int64_t next = panel + width;
        const int64_t next_width = min_of(panel_columns, rows.columns - next);
        const int64_t unpack_turns = 2 * kTile * ((width + kTurnColumns - 1) / kTurnColumns);
        const int64_t turns = unpack_turns + (blocks + 1) / 2 * steps;
        TokensAhead tokens_ahead(tokens, next / kTileColumns, tile_steps(next_width), from, to,
                                 (end - begin) * unpack_turns);
        for (int64_t i = begin; i < end; ++i) {
          Ahead ahead = i + 1 < end      ? rows.ahead(rows.place(i + 1), panel, width, turns)
                        : next_width > 0 ? rows.ahead(rows.place(begin), next, next_width, turns)
                                         : rows.ahead(rows.place(end), 0,
                                                      min_of(panel_columns, rows.columns), turns);
          const RowTiles tiles =
              rows.unpack(rows.pair_at(i), panel, width, ahead, tokens_ahead, buffer);
          multiply_panel(tiles, tokens, from, to, panel / kTileColumns, steps, ahead,
                         buffer.results + (i - begin) * blocks);
        }
      }
      for (int64_t i = begin; i < end; ++i) {
        done(i, from, to, buffer.results + (i - begin) * blocks);
      }
    }
  }
}

template <class W>
void up_packed(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
               std::byte* buffer) {
  const moe::Layer& layer = *work.layer;
  const int64_t step = layer.interleaved ? 2 : 1;
  const int64_t unit = layer.gated ? kTile : 2 * kTile;
  // Gate and up, or two tiles of the only rows.
  const auto pair_at = [&](int64_t i) -> TilePair {
    const int64_t row = begin + i * unit;
    const int64_t rows = min_of(kTile, end - row);
    if (!layer.gated) {
      const int64_t second = row + kTile;
      return {row, rows, second, second < end ? min_of(kTile, end - second) : 0};
    }
    return {row * step, rows, layer.interleaved ? row * step + 1 : layer.intermediate + row, rows};
  };
  const int64_t pairs = (end - begin + unit - 1) / unit;
  // Mostly the next task is of the same expert.
  const Rows<W, decltype(pair_at)> weights{.matrix = layer.w13,
                                           .expert = group.expert,
                                           .step = step,
                                           .k_begin = 0,
                                           .columns = layer.hidden,
                                           .pairs = pairs,
                                           .pair_at = pair_at,
                                           .following = {group.expert, pair_at(pairs)}};
  const int64_t steps = tile_steps(layer.hidden);
  const Tokens tokens{work.packed_x + group.packed * steps * kTileBytes, block_count(group), steps};
  [[maybe_unused]] const TileScope scope;
  alignas(64) float first_bias[kTile] = {};
  alignas(64) float second_bias[kTile] = {};

  multiply_rows(weights, tokens, buffer, [&](int64_t i, int64_t from, int64_t to, Result* results) {
    const TilePair pair = pair_at(i);
    const int64_t row = begin + i * unit;
    load_bias(layer, layer.w13, group.expert, pair.first, step, pair.first_rows, first_bias);
    load_bias(layer, layer.w13, group.expert, pair.second, step, pair.second_rows, second_bias);
    for (int64_t block = from; block < to; ++block, ++results) {
      auto& gate = results->value[0];
      auto& up = results->value[1];
      const int64_t token = block * kTile;
      const auto there = static_cast<__mmask16>((1u << min_of(kTile, group.count - token)) - 1);
      const V::F scale = layer.router_weight_on_input
                             ? _mm512_maskz_loadu_ps(there, work.pair_weight + group.begin + token)
                             : V::set(1.0f);
      for (int64_t r = 0; r < kTile; ++r) {
        const V::F a = V::fma(V::load(gate[r]), scale, V::set(first_bias[r]));
        const V::F c = V::fma(V::load(up[r]), scale, V::set(second_bias[r]));
        V::store(gate[r], layer.gated ? activate(layer, a, c) : activate_gate(layer, a));
        if (!layer.gated) V::store(up[r], activate_gate(layer, c));
      }
      store_inner<W>(work, group, block, row, pair.first_rows, gate);
      if (!layer.gated && pair.second_rows > 0) {
        store_inner<W>(work, group, block, pair.second, pair.second_rows, up);
      }
    }
  });
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
  const auto pair_at = [&](int64_t i) -> TilePair {
    const int64_t row = begin + i * 2 * kTile;
    const int64_t second = row + kTile;
    return {row, min_of(kTile, end - row), second, second < end ? min_of(kTile, end - second) : 0};
  };
  const int64_t pairs = (end - begin + 2 * kTile - 1) / (2 * kTile);
  // The same rows of the next group, and behind the last one the next task.
  const Place following = &group + 1 < work.groups + work.group_count
                              ? Place{(&group + 1)->expert, pair_at(0)}
                              : Place{work.groups->expert, pair_at(pairs)};
  const Rows<W, decltype(pair_at)> weights{.matrix = layer.w2,
                                           .expert = group.expert,
                                           .step = 1,
                                           .k_begin = work.inner_begin,
                                           .columns = columns,
                                           .pairs = pairs,
                                           .pair_at = pair_at,
                                           .following = following};
  const int64_t steps = tile_steps(columns);
  const Tokens tokens{work.packed_inner + group.packed * steps * kTileBytes, block_count(group),
                      steps};
  [[maybe_unused]] const TileScope scope;
  alignas(64) float bias[2 * kTile] = {};

  multiply_rows(
      weights, tokens, buffer, [&](int64_t i, int64_t from, int64_t to, const Result* results) {
        const TilePair pair = pair_at(i);
        if (work.inner_begin == 0) {
          load_bias(layer, layer.w2, group.expert, pair.first, 1,
                    pair.first_rows + pair.second_rows, bias);
        }
        for (int64_t block = from; block < to; ++block, ++results) {
          const int64_t first_pair = group.begin + block * kTile;
          const int64_t tokens = min_of(kTile, group.count - block * kTile);
          add_tile(work, first_pair, tokens, pair.first, pair.first_rows, bias, results->value[0]);
          if (pair.second_rows > 0) {
            add_tile(work, first_pair, tokens, pair.second, pair.second_rows, bias + kTile,
                     results->value[1]);
          }
        }
      });
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

inline int64_t buffer_bytes(const moe::Layer&) { return sizeof(Buffer); }

template <class Small>
void finish_small(const moe::Work& work, const moe::Group& group) {
  if (group.packed < 0) finish_rows<Small>(work, group);
}
template <class Small>
constexpr auto finish_of_small() -> void (*)(const moe::Work&, const moe::Group&) {
  if constexpr (finish_of<Small>() != nullptr) {
    return finish_small<Small>;
  } else {
    return nullptr;
  }
}

template <class Small, class W>
constexpr moe::Kernels kTileKernels{sizeof(typename Small::Operand),
                                    kInnerAlign<Small>,
                                    prepare<Small>,
                                    up_either<Small, W>,
                                    down_either<Small, W>,
                                    finish_of_small<Small>(),
                                    W::kPackedTokens,
                                    pack<W>,
                                    buffer_bytes};

}  // namespace
