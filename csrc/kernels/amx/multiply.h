// Products of two tiles of weight rows with the packed tokens of a group.
#pragma once

#include "kernels/amx/pack.h"

namespace {

// The tokens' part of the next panel, steps [first, first + steps) of blocks [from, to), fetched a
// few lines at each of `turns`: so it is in L2 when its turn comes.
class TokensAhead {
 public:
  TokensAhead(const Tokens& tokens, int64_t first, int64_t steps, int64_t from, int64_t to,
              int64_t turns) {
    if (steps <= 0) return;
    // Panels of all the blocks follow one another; of some of them, only the first is asked for.
    const bool all = to - from == tokens.blocks;
    const int64_t width = all || steps < kPanelSteps ? steps : kPanelSteps;
    at_ = tokens.tile(from, first);
    end_ = at_ + (to - from) * width * kTileBytes;
    lines_a_turn_ = ((end_ - at_) / 64 + turns - 1) / turns;
  }
  void fetch() {
    for (int64_t i = 0; i < lines_a_turn_ && at_ < end_; ++i, at_ += 64) {
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;
  int64_t lines_a_turn_ = 0;
};

// Two tiles of weight rows, and behind each those of the next columns.
struct RowTiles {
  const std::byte* first;
  const std::byte* second;
  int64_t stride;  // from row to row
  int64_t width;   // from tile to tile
};

// Adds to the results of kTokenTiles blocks of tokens (1 or 2), from `block` on, the products with
// two row tiles over the tiles of columns [first, first + steps); or begins them. Two by two, four
// products share four loads.
template <int kTokenTiles>
inline void multiply(const RowTiles& rows, const Tokens& tokens, int64_t block, int64_t first,
                     int64_t steps, Result* results, Ahead& ahead) {
  Ahead next = ahead;  // a copy stays in registers
  const std::byte* a0 = rows.first;
  const std::byte* a1 = rows.second;
  // GCC's tileloadd does not say that it reads memory: whatever was written there has to be by now.
  __asm__ volatile("" ::: "memory");
  if (first == 0) {
    MOE_TILE_ZERO(0);
    MOE_TILE_ZERO(1);
    MOE_TILE_ZERO(2);
    MOE_TILE_ZERO(3);
  } else {
    MOE_TILE_LOAD(0, results[0].value[0], 64);
    MOE_TILE_LOAD(2, results[0].value[1], 64);
    if constexpr (kTokenTiles == 2) {
      MOE_TILE_LOAD(1, results[1].value[0], 64);
      MOE_TILE_LOAD(3, results[1].value[1], 64);
    }
  }
  for (int64_t begin = first; begin < first + steps; begin += kPanelSteps) {
    const std::byte* b0 = tokens.tile(block, begin);
    [[maybe_unused]] const std::byte* b1 = tokens.tile(block + kTokenTiles - 1, begin);
    const int64_t left = first + steps - begin;
    const int64_t bytes = (left < kPanelSteps ? left : kPanelSteps) * kTileBytes;
    for (int64_t k = 0; k < bytes; k += kTileBytes, a0 += rows.width, a1 += rows.width) {
      MOE_TILE_LOAD(4, a0, rows.stride);
      MOE_TILE_LOAD(6, b0 + k, 64);
      MOE_TILE_MULTIPLY(0, 4, 6);
      MOE_TILE_LOAD(5, a1, rows.stride);
      MOE_TILE_MULTIPLY(2, 5, 6);
      if constexpr (kTokenTiles == 2) {
        MOE_TILE_LOAD(7, b1 + k, 64);
        MOE_TILE_MULTIPLY(1, 4, 7);
        MOE_TILE_MULTIPLY(3, 5, 7);
      }
      next.fetch();
    }
  }
  ahead = next;
  MOE_TILE_STORE(0, results[0].value[0], 64);
  MOE_TILE_STORE(2, results[0].value[1], 64);
  if constexpr (kTokenTiles == 2) {
    MOE_TILE_STORE(1, results[1].value[0], 64);
    MOE_TILE_STORE(3, results[1].value[1], 64);
  }
}

// The same for blocks [from, to).
inline void multiply_panel(const RowTiles& rows, const Tokens& tokens, int64_t from, int64_t to,
                           int64_t first, int64_t steps, Ahead& ahead, Result* results) {
  int64_t block = from;
  for (; block + 2 <= to; block += 2, results += 2) {
    multiply<2>(rows, tokens, block, first, steps, results, ahead);
  }
  if (block < to) multiply<1>(rows, tokens, block, first, steps, results, ahead);
}

}  // namespace
