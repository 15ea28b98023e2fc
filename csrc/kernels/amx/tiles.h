// The tile instructions, and their arithmetic in plain code for hosts that lack them: a build with
// MOE_EMULATE_AMX runs the AMX kernels anywhere that AVX512-BF16 is, to test everything around the
// instructions. Tile numbers are literals: the compiler's header pastes them into assembly.
#pragma once

#include <immintrin.h>

#include "kernels/kernel.h"

namespace {

// All eight tiles: 16 rows of 64 bytes. A constant and not a local: GCC's ldtilecfg tells the
// compiler that it reads 8 bytes, which may then leave out the rest of a local.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
[[maybe_unused]] constexpr TileConfig kTileConfig;

#ifdef MOE_EMULATE_AMX

struct EmulatedTile {
  alignas(64) std::byte bytes[16][64];
};
thread_local EmulatedTile emulated_tiles[8];

inline void emulated_load(int tile, const void* base, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memcpy(emulated_tiles[tile].bytes[r],
                     static_cast<const std::byte*>(base) + r * stride, 64);
  }
}
inline void emulated_store(int tile, void* base, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memcpy(static_cast<std::byte*>(base) + r * stride, emulated_tiles[tile].bytes[r], 64);
  }
}
inline void emulated_zero(int tile) {
  __builtin_memset(&emulated_tiles[tile], 0, sizeof(EmulatedTile));
}
inline void emulated_multiply(int to, int a, int b) {
  for (int r = 0; r < 16; ++r) {
    __m512 sum = _mm512_load_ps(emulated_tiles[to].bytes[r]);
    for (int pair = 0; pair < 16; ++pair) {
      int32_t two;
      __builtin_memcpy(&two, emulated_tiles[a].bytes[r] + 4 * pair, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(two),
                             (__m512bh)_mm512_load_si512(emulated_tiles[b].bytes[pair]));
    }
    _mm512_store_ps(emulated_tiles[to].bytes[r], sum);
  }
}
#define MOE_TILE_LOAD(tile, base, stride) emulated_load(tile, base, stride)
#define MOE_TILE_STORE(tile, base, stride) emulated_store(tile, base, stride)
#define MOE_TILE_ZERO(tile) emulated_zero(tile)
#define MOE_TILE_MULTIPLY(to, a, b) emulated_multiply(to, a, b)

// Held while tiles are in use.
struct TileScope {};

#else

#define MOE_TILE_LOAD(tile, base, stride) _tile_loadd(tile, base, static_cast<long>(stride))
#define MOE_TILE_STORE(tile, base, stride) _tile_stored(tile, base, static_cast<long>(stride))
#define MOE_TILE_ZERO(tile) _tile_zero(tile)
#define MOE_TILE_MULTIPLY(to, a, b) _tile_dpbf16ps(to, a, b)

// Held while tiles are in use: released tiles need not be saved on a context switch.
struct TileScope {
  TileScope() { _tile_loadconfig(&kTileConfig); }
  ~TileScope() { _tile_release(); }
};

#endif

// One operand on the weights' side: 16 rows, `stride` bytes apart, 32 bf16 of each at a time.
struct TileRows {
  const std::byte* base;
  int64_t stride;
};

// The result of a multiplication: 32 weight rows by 32 tokens, rows contiguous, in 16x16 quarters.
struct Quarters {
  alignas(64) float value[2][2][16][16];  // [row tile][token tile][row][token]
};

// The weight rows that are needed next, as they lie in memory, and which of their cache lines to
// fetch now: `line`, `line + every`, ... Fetched all at once they would come no faster than memory
// gives them, and the tiles would wait.
struct Ahead {
  TileRows first;
  TileRows second;
  int64_t lines;  // of a row; 0: nothing to fetch
  int64_t line;
  int64_t every;
};

// Weights a0 and a1 by packed tokens b0 and b1 (see pack.h) over `steps` times 32 columns.
// Four products share four loads.
inline void multiply(const TileRows& a0, const TileRows& a1, const std::byte* b0,
                     const std::byte* b1, int64_t steps, const Ahead& ahead, Quarters& out) {
  // GCC's tileloadd does not say that it reads memory: whatever was written there has to be by now.
  __asm__ volatile("" ::: "memory");
  MOE_TILE_ZERO(0);
  MOE_TILE_ZERO(1);
  MOE_TILE_ZERO(2);
  MOE_TILE_ZERO(3);
  int64_t next = ahead.line;
  for (int64_t k = 0; k < steps; ++k) {
    const std::byte* w0 = a0.base + k * 64;
    const std::byte* w1 = a1.base + k * 64;
    MOE_TILE_LOAD(4, w0, a0.stride);
    MOE_TILE_LOAD(6, b0 + k * 1024, 64);
    MOE_TILE_MULTIPLY(0, 4, 6);
    MOE_TILE_LOAD(7, b1 + k * 1024, 64);
    MOE_TILE_MULTIPLY(1, 4, 7);
    MOE_TILE_LOAD(5, w1, a1.stride);
    MOE_TILE_MULTIPLY(2, 5, 6);
    MOE_TILE_MULTIPLY(3, 5, 7);
    if (k == next && next < ahead.lines) {
      // Into L2: the next rows are 16 pages on, and L1 has no room for them all.
      for (int r = 0; r < 16; ++r) {
        __builtin_prefetch(ahead.first.base + next * 64 + r * ahead.first.stride, 0, 2);
        __builtin_prefetch(ahead.second.base + next * 64 + r * ahead.second.stride, 0, 2);
      }
      next += ahead.every;
    }
  }
  MOE_TILE_STORE(0, out.value[0][0], 64);
  MOE_TILE_STORE(1, out.value[0][1], 64);
  MOE_TILE_STORE(2, out.value[1][0], 64);
  MOE_TILE_STORE(3, out.value[1][1], 64);
}

}  // namespace
