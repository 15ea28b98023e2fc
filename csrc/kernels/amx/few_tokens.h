// Groups of few tokens by 8-bit tiles: weights of codes, which are small whole numbers, by tokens
// of digits.h.
//
// A format F has rows (Row, row, address); kBits, those of a code; `codes` of the 64 columns from k
// on, of which `left` are there, in kOrder; kShift, log2 of the columns that share a scale, or of a
// line's; `scales` of so many groups from column k on, as floats; kUnit, what 1 of the products of
// code and scale stands for. Of several that a matrix may be in, `choose` finds the one.
//
// Two tiles of 16 rows of weights pass over all the group's blocks, a line (128 columns) at a time:
// unpacked to four tiles in L1, multiplied, and the results, which are whole numbers, converted,
// multiplied by the rows' scales and added to floats. What is stored by vectors and loaded as a
// tile, or the other way round, waits for the cache: so a line is unpacked while the tiles of the
// one before are multiplied, and behind them the results of the one before that are added. For each
// row and line of nibbles: 4 vector instructions to unpack, and for each pass 2 to add, or 4 where
// the line's two tiles of codes have scales of their own.
#pragma once

#include "kernels/amx/body.h"
#include "kernels/amx/digits.h"

namespace {

// Columns of a row whose scales are converted at once, and whose weights are fetched at once: 512
// bytes of nibbles that lie together, while those before are multiplied.
constexpr int64_t kCodePanel = 1024;
constexpr int64_t kPanelLines = kCodePanel / kLineColumns;

// Rows that are unpacked in a turn of fetching, and turns of two tiles of rows.
constexpr int64_t kTurnRows = 8;
constexpr int64_t kUnpackTurns = 2 * kTile / kTurnRows;

// Groups of more tokens or more blocks are multiplied by tiles of bf16.
constexpr int64_t kFewTokens = 16;
constexpr int64_t kFewBlocks = 4;

// Of a format F.
template <class F>
constexpr int kGroupsOf = kGroupsOfTile<F::kShift>;
template <class F>
constexpr int64_t kBlockTokens = kDigitTokens<kGroupsOf<F>>;
template <class F>
constexpr int64_t kMostFewTokens = min_of(kFewTokens, kFewBlocks* kBlockTokens<F>);
// Results of a line that are added each by itself.
template <class F>
constexpr int kParts = F::kShift < 7 ? 2 : 1;

// The digits of each block and, where it has any, its rests.
constexpr int64_t kMostPasses = 2 * kFewBlocks;

// Of two tiles of rows: [row tile][row][column of operands].
template <class T>
using PairResult = T[2][kTile][kTile];

// A thread's buffer.
struct alignas(64) FewBuffer {
  std::byte codes[2][2 * kLineBytes];  // of two lines, as are the results
  PairResult<int32_t> results[2][kMostPasses][2];
  PairResult<float> sums[kMostPasses];
  float scales[2 * kTile][kCodePanel / 16];
  float products[2][kFewTokens][kTile];  // [row tile][token][row]
};
static_assert(sizeof(FewBuffer) <= sizeof(Buffer));

// A group's operands.
template <class F>
struct FewTokens {
  int64_t count;
  int64_t columns;  // of a tile of operands
  int64_t row_bytes;
  int64_t line_bytes;
  int64_t pass_count = 0;
  const std::byte* passes[kMostPasses];  // tiles of operands
  const DigitBlock::Header* headers[kFewBlocks];

  FewTokens(std::byte* packed, const moe::Group& group, int64_t row_columns) : count(group.count) {
    for (int64_t i = 0; i * kBlockTokens<F> < count; ++i) {
      const DigitBlock block = digit_block<kGroupsOf<F>>(packed, group, row_columns, i);
      columns = block.columns;
      row_bytes = block.row_bytes();
      line_bytes = block.line_bytes();
      headers[i] = &block.header();
      passes[pass_count++] = block.digits();
      if (block.header().has_rests) passes[pass_count++] = block.rests();
    }
  }

  // A line is needed soon: into L1.
  void fetch(int64_t line) const {
    for (int64_t p = 0; p < pass_count; ++p) {
      const std::byte* at = passes[p] + line * line_bytes;
      for (int64_t i = 0; i < line_bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
    }
  }
};

// Of one row, 128 columns from k on, of which `left` are there: to two tiles.
template <class F>
[[gnu::always_inline]] inline void unpack_row(const typename F::Row& row, int64_t k, int64_t left,
                                              std::byte* to) {
#pragma GCC unroll 2
  for (int64_t part = 0; part < 2; ++part) {
    const int64_t column = k + part * kCodeColumns;
    const int64_t there = left - part * kCodeColumns;
    if (there <= 0) break;  // what is in the tile then is multiplied by zeros
    // The next line into L1; it is in L2 by then.
    if (part * kCodeColumns * F::kBits % 512 == 0) {
      __builtin_prefetch(F::address(row, column + kLineColumns), 0, 3);
    }
    _mm512_store_si512(to + part * kTileBytes, F::codes(row, column, there));
  }
}

// Of two tiles of rows: to [row tile][64 columns].
template <class F>
[[gnu::always_inline]] inline void unpack_rows(const typename F::Row* rows, int64_t k, int64_t left,
                                               std::byte* to, Ahead& ahead) {
  for (int64_t turn = 0; turn < kUnpackTurns; ++turn) {
    ahead.fetch();
#pragma GCC unroll 8
    for (int64_t r = 0; r < kTurnRows; ++r) unpack_row<F>(rows[r], k, left, to + r * 64);
    rows += kTurnRows;
    // From the first half of a tile to the second, or to the next tile of rows.
    to += turn % 2 == 0 ? kTurnRows * 64 : kLineBytes - kTurnRows * 64;
  }
}
template <class F>
inline void unpack_line(const typename F::Row* rows, int64_t k, int64_t left, std::byte* to,
                        Ahead& ahead) {
  if (left >= kLineColumns) {
    unpack_rows<F>(rows, k, kLineColumns, to, ahead);
  } else {
    unpack_rows<F>(rows, k, left, to, ahead);
  }
}

// The products of a line: each pass's results, of the line or of its 64 columns each.
template <class F>
inline void multiply_line(const std::byte* codes, const FewTokens<F>& tokens, int64_t line,
                          PairResult<int32_t> (*results)[2]) {
  constexpr int kLast = kParts<F> - 1;
  // GCC's tileloadd does not say that it reads memory.
  __asm__ volatile("" ::: "memory");
  MOE_TILE_LOAD(4, codes, 64);
  MOE_TILE_LOAD(5, codes + kLineBytes, 64);
  MOE_TILE_LOAD(6, codes + kTileBytes, 64);
  MOE_TILE_LOAD(7, codes + kLineBytes + kTileBytes, 64);
  for (int64_t p = 0; p < tokens.pass_count; ++p, ++results) {
    const std::byte* operands = tokens.passes[p] + line * tokens.line_bytes;
    MOE_TILE_ZERO(0);
    MOE_TILE_ZERO(1);
    MOE_TILE_LOAD(2, operands, tokens.row_bytes);
    MOE_TILE_MULTIPLY_BYTES(0, 4, 2);
    MOE_TILE_MULTIPLY_BYTES(1, 5, 2);
    if constexpr (kParts<F> == 2) {
      MOE_TILE_STORE(0, (*results)[0][0], 64);
      MOE_TILE_STORE(1, (*results)[0][1], 64);
      MOE_TILE_ZERO(0);
      MOE_TILE_ZERO(1);
    }
    MOE_TILE_LOAD(3, operands + tokens.line_bytes / 2, tokens.row_bytes);
    MOE_TILE_MULTIPLY_BYTES(0, 6, 3);
    MOE_TILE_MULTIPLY_BYTES(1, 7, 3);
    MOE_TILE_STORE(0, (*results)[kLast][0], 64);
    MOE_TILE_STORE(1, (*results)[kLast][1], 64);
  }
  __asm__ volatile("" ::: "memory");
}

// The scales of kGroups groups, in turns: as the columns of a result are.
template <int kGroups>
[[gnu::always_inline]] inline __m512 in_turns(const float* scales) {
  if constexpr (kGroups == 1) {
    return _mm512_set1_ps(*scales);
  } else if constexpr (kGroups == 2) {
    double both;
    __builtin_memcpy(&both, scales, sizeof both);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
  } else {
    static_assert(kGroups == 4);
    return _mm512_broadcast_f32x4(_mm_loadu_ps(scales));
  }
}

// Adds a line's results to the sums; its scales are at `at` of each row's.
template <class F>
inline void add_line(FewBuffer& buffer, int64_t at, const PairResult<int32_t> (*results)[2],
                     int64_t passes) {
  for (int64_t p = 0; p < passes; ++p, ++results) {
#pragma GCC unroll 2
    for (int64_t tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 16
      for (int64_t r = 0; r < kTile; ++r) {
        const float* scales = buffer.scales[tile * kTile + r] + at;
        float* sums = buffer.sums[p][tile][r];
        V::F sum = _mm512_load_ps(sums);
#pragma GCC unroll 2
        for (int part = 0; part < kParts<F>; ++part) {
          const __m512i whole = _mm512_load_si512((*results)[part][tile][r]);
          sum = V::fma(_mm512_cvtepi32_ps(whole),
                       in_turns<kGroupsOf<F>>(scales + part * kGroupsOf<F>), sum);
        }
        _mm512_store_ps(sums, sum);
      }
    }
  }
}

// The sums of both row tiles to products: digits, and a token's groups, together, in its unit.
template <class F>
inline void finish_products(const FewTokens<F>& tokens, FewBuffer& buffer) {
  constexpr int kGroups = kGroupsOf<F>;
  for (int64_t tile = 0; tile < 2; ++tile) {
    const PairResult<float>* sums = buffer.sums;
    for (int64_t first = 0; first < tokens.count; first += kBlockTokens<F>) {
      const DigitBlock::Header& header = *tokens.headers[first / kBlockTokens<F>];
      const auto columns = [&](__m512i(&lanes)[16]) {
        for (int64_t r = 0; r < kTile; ++r) lanes[r] = _mm512_load_si512((*sums)[tile][r]);
        transpose(lanes);
        ++sums;
      };
      __m512i digits[16];
      columns(digits);
      __m512i rests[16] = {};
      if (header.has_rests) columns(rests);
      const int64_t count = min_of(kBlockTokens<F>, tokens.count - first);
      for (int64_t t = 0; t < count; ++t) {
        V::F sum = V::zero();
        for (int g = 0; g < kGroups; ++g) {
          const int64_t column = 2 * kGroups * t + g;
          const auto number = [&](const __m512i(&lanes)[16]) {
            return V::fma(_mm512_castsi512_ps(lanes[column]), V::set(256.0f),
                          _mm512_castsi512_ps(lanes[column + kGroups]));
          };
          sum = V::add(sum, V::fma(number(rests), V::set(kRestUnit), number(digits)));
        }
        V::store(buffer.products[tile][first + t], V::mul(sum, V::set(header.unit[t] * F::kUnit)));
      }
    }
  }
}

// The products of the i-th pair of row tiles.
template <class F, class Rows>
inline void multiply_few(const Rows& rows, int64_t i, const FewTokens<F>& tokens,
                         FewBuffer& buffer) {
  const TilePair pair = rows.pair_at(i);
  const int64_t lines = line_count(rows.columns);
  // Rows that are not there are others' once more.
  typename F::Row row[2 * kTile];
  for (int64_t r = 0; r < kTile; ++r) {
    const int64_t first = pair.first + min_of(r, pair.first_rows - 1) * rows.step;
    const int64_t second =
        pair.second_rows > 0 ? pair.second + min_of(r, pair.second_rows - 1) * rows.step : first;
    row[r] = F::row(rows.matrix, rows.expert, first, rows.k_begin);
    row[kTile + r] = F::row(rows.matrix, rows.expert, second, rows.k_begin);
  }
  for (int64_t p = 0; p < tokens.pass_count; ++p) {
    for (int64_t r = 0; r < 2 * kTile; ++r) {
      _mm512_store_ps(buffer.sums[p][r / kTile][r % kTile], V::zero());
    }
  }

  const auto ahead_of = [&](int64_t line) {
    const int64_t panel = line * kLineColumns;
    const int64_t turns = kUnpackTurns * min_of(kPanelLines, lines - line);
    const int64_t next = panel + kCodePanel;
    return next < rows.columns
               ? rows.ahead(rows.place(i), next, min_of(kCodePanel, rows.columns - next), turns)
               : rows.ahead(rows.place(i + 1), 0, min_of(kCodePanel, rows.columns), turns);
  };
  Ahead ahead = ahead_of(0);
  const auto unpack = [&](int64_t line) {
    const int64_t k = line * kLineColumns;
    unpack_line<F>(row, k, rows.columns - k, buffer.codes[line % 2], ahead);
  };
  const auto add = [&](int64_t line) {
    const int64_t within = line % kPanelLines;
    if (within == 0) {
      const int64_t k = line * kLineColumns;
      const int64_t groups = min_of(kCodePanel, rows.columns - k) >> F::kShift;
      for (int64_t r = 0; r < 2 * kTile; ++r) F::scales(row[r], k, groups, buffer.scales[r]);
    }
    add_line<F>(buffer, within * (kLineColumns >> F::kShift), buffer.results[line % 2],
                tokens.pass_count);
  };

  tokens.fetch(0);
  unpack(0);
  for (int64_t line = 0; line < lines; ++line) {
    multiply_line(buffer.codes[line % 2], tokens, line, buffer.results[line % 2]);
    if (line + 1 < lines) {
      tokens.fetch(line + 1);
      if ((line + 1) % kPanelLines == 0) ahead = ahead_of(line + 1);
      unpack(line + 1);
    }
    if (line > 0) add(line - 1);
  }
  add(lines - 1);
  finish_products(tokens, buffer);
}

template <class F>
void up_few(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
            std::byte* memory) {
  const moe::Layer& layer = *work.layer;
  FewBuffer& buffer = *reinterpret_cast<FewBuffer*>(memory);
  const FewTokens<F> tokens(work.packed_x, group, layer.hidden);
  [[maybe_unused]] const TileScope scope(tokens.columns);
  PairBias bias;

  with_up_rows<F>(work, group, begin, end, [&](const auto& rows) {
    for (int64_t i = 0; i < rows.pairs; ++i) {
      multiply_few(rows, i, tokens, buffer);
      const TilePair pair = rows.pair_at(i);
      bias.load(layer, layer.w13, group.expert, rows.step, pair);
      const int64_t row = begin + i * (layer.gated ? kTile : 2 * kTile);
      for (int64_t t = 0; t < tokens.count; ++t) {
        const int64_t of = group.begin + t;
        const V::F scale = V::set(layer.router_weight_on_input ? work.pair_weight[of] : 1.0f);
        const V::F a = V::fma(V::load(buffer.products[0][t]), scale, V::load(bias.first));
        const V::F c = V::fma(V::load(buffer.products[1][t]), scale, V::load(bias.second));
        float* inner =
            reinterpret_cast<float*>(work.inner) + of * work.inner_stride + row - work.inner_begin;
        const auto store = [&](float* to, int64_t count, V::F values) {
          _mm512_mask_storeu_ps(to, elements_there(0, count), values);
        };
        store(inner, pair.first_rows,
              layer.gated ? activate(layer, a, c) : activate_gate(layer, a));
        if (!layer.gated) store(inner + kTile, pair.second_rows, activate_gate(layer, c));
      }
    }
  });
}

template <class F>
void down_few(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
              std::byte* memory) {
  const moe::Layer& layer = *work.layer;
  FewBuffer& buffer = *reinterpret_cast<FewBuffer*>(memory);
  const FewTokens<F> tokens(work.packed_inner, group, work.inner_end - work.inner_begin);
  [[maybe_unused]] const TileScope scope(tokens.columns);
  PairBias bias;

  with_down_rows<F>(work, group, begin, end, [&](const auto& rows) {
    for (int64_t i = 0; i < rows.pairs; ++i) {
      multiply_few(rows, i, tokens, buffer);
      const TilePair pair = rows.pair_at(i);
      if (work.inner_begin == 0) bias.load(layer, layer.w2, group.expert, 1, pair);
      for (int64_t t = 0; t < tokens.count; ++t) {
        const int64_t of = group.begin + t;
        add_rows(work, of, pair.first, pair.first_rows, bias.first, V::load(buffer.products[0][t]));
        add_rows(work, of, pair.second, pair.second_rows, bias.second,
                 V::load(buffer.products[1][t]));
      }
    }
  });
}

// A block of a group from its rows, row_at(pair).
template <class F, class RowAt>
inline void pack_few(const moe::Group& group, int64_t index, int64_t columns, std::byte* packed,
                     const RowAt& row_at) {
  const int64_t first = index * kBlockTokens<F>;
  pack_digits<kGroupsOf<F>>([&](int64_t t) { return row_at(group.begin + first + t); },
                            min_of(kBlockTokens<F>, group.count - first), columns, F::kOrder,
                            digit_block<kGroupsOf<F>>(packed, group, columns, index));
}

// Groups of few tokens by Few, one of whose formats a matrix is in; more by W.
template <class Few, class W>
struct EitherTiles {
  static moe::Packing packing(const moe::Layer& layer) {
    return Few::choose(layer.w13, []<class F>() -> moe::Packing {
      return {1, kMostFewTokens<F>, kBlockTokens<F>};
    });
  }

  static bool is_few(const moe::Layer& layer, const moe::Group& group) {
    return group.count <= packing(layer).few;
  }

  static void pack(const moe::Work& work, const moe::Group& group, int64_t block) {
    const moe::Layer& layer = *work.layer;
    if (!is_few(layer, group)) return ::pack<W>(work, group, block);
    const auto* source = static_cast<const moe::Bf16*>(work.source);
    Few::choose(layer.w13, [&]<class F>() {
      pack_few<F>(group, block, layer.hidden, work.packed_x,
                  [&](int64_t pair) { return source + work.pair_token[pair] * layer.hidden; });
    });
  }

  static void up(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end,
                 std::byte* buffer) {
    if (!is_few(*work.layer, group)) return up_packed<W>(work, group, begin, end, buffer);
    Few::choose(work.layer->w13, [&]<class F>() { up_few<F>(work, group, begin, end, buffer); });
  }

  // The rows of few tokens are floats until all of them are there.
  static void finish(const moe::Work& work, const moe::Group& group) {
    if (!is_few(*work.layer, group)) return;
    const auto* inner = reinterpret_cast<const float*>(work.inner);
    Few::choose(work.layer->w2, [&]<class F>() {
      for (int64_t i = 0; i * kBlockTokens<F> < group.count; ++i) {
        pack_few<F>(group, i, work.inner_end - work.inner_begin, work.packed_inner,
                    [&](int64_t pair) { return inner + pair * work.inner_stride; });
      }
    });
  }

  static void down(const moe::Work& work, int64_t begin, int64_t end, std::byte* buffer) {
    clear_sums(work, begin, end);
    for (int64_t g = 0; g < work.group_count; ++g) {
      const moe::Group& group = work.groups[g];
      if (is_few(*work.layer, group)) {
        Few::choose(work.layer->w2,
                    [&]<class F>() { down_few<F>(work, group, begin, end, buffer); });
      } else {
        down_packed<W>(work, group, begin, end, buffer);
      }
    }
    round_sums(work, begin, end);
  }

  static constexpr moe::Kernels kKernels{sizeof(float), moe::kRowAlign, nullptr, up,          down,
                                         finish,        packing,        pack,    buffer_bytes};
};

}  // namespace
