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

constexpr int64_t kTile = 16;  // rows and columns of a result
constexpr int64_t kTileColumns = 32;
constexpr int64_t kTileBytes = 1024;

// The result for two tiles of weight rows and one of tokens: [row tile][row][token].
struct Result {
  alignas(64) float value[2][kTile][kTile];
};

// Of weights whose rows are unpacked each by itself.
struct NoState {};

// The weights that are needed next, as they lie in memory: 2 x 16 rows of some cache lines. They
// are fetched a few at each of `turns`, a row unpacked or a step of products: all at once they
// would come no faster than memory gives them, and memory would rest afterwards.
class Ahead {
 public:
  Ahead(const std::byte* first, const std::byte* second, int64_t stride, int64_t row_bytes,
        int64_t turns)
      : row_(first), second_(second), stride_(stride), row_bytes_(row_bytes), at_(first) {
    const int64_t lines = 2 * kTile * ((row_bytes + 63) / 64);
    lines_a_turn_ = (lines + turns - 1) / turns;
  }
  void fetch() {
    for (int64_t i = 0; i < lines_a_turn_ && rows_left_ > 0; ++i) {
      // Into L2: L1 is full of what is being multiplied.
      __builtin_prefetch(at_, 0, 2);
      at_ += 64;
      if (at_ < row_ + row_bytes_) continue;
      --rows_left_;
      row_ = rows_left_ == kTile ? second_ : row_ + stride_;
      at_ = row_;
    }
  }

 private:
  const std::byte* row_;
  const std::byte* second_;
  int64_t stride_;
  int64_t row_bytes_;
  int64_t lines_a_turn_;
  const std::byte* at_;
  int64_t rows_left_ = 2 * kTile;
};

}  // namespace
