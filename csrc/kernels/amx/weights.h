// The weights' side of the products: rows of tiles, unpacked to bf16. A format W has `unpack`, the
// columns of one row to the rows of successive tiles, and the order that it leaves each 32 columns
// in; State, what it keeps from one row of a tile to the next; kIsTileRow: whether its rows are
// rows of tiles where they lie. Missing columns may hold anything finite: the tokens are zero
// there.
#pragma once

#include "kernels/amx/tiles.h"
#include "kernels/formats/bf16_pairs.h"
#include "kernels/formats/bytes.h"
#include "kernels/formats/numbers.h"

namespace {

struct NaturalColumns {
  static constexpr int64_t column(int64_t position) { return position; }
  static __m512i arrange_columns(__m512i row) { return row; }
};

struct Bf16Tiles : Bf16Pairs, NaturalColumns {
  static constexpr bool kIsTileRow = true;
  static constexpr int64_t kPackedTokens = 8;
  using State = NoState;
  static void unpack(const Row& row, int64_t columns, std::byte* to, State&) {
    for (int64_t c = 0; c < columns; c += kTileColumns, to += kTileBytes) {
      const int64_t left = columns - c;
      _mm512_store_si512(to, (__m512i)(left < kStep ? load_tail(row, c, left) : load(row, c)));
    }
  }
};

struct Int8Tiles : Bytes<moe::Format::kInt8>, NaturalColumns {
  static constexpr bool kIsTileRow = false;
  // Below, int8_quads.h.
  static constexpr int64_t kPackedTokens = 10;
  using State = NoState;
  static void unpack(const Row& row, int64_t columns, std::byte* to, State&) {
    for (int64_t c = 0; c < columns; c += kTileColumns, to += kTileBytes) {
      const int64_t left = columns - c;
      const V::Pair pair = left < kStep ? load_tail(row, c, left) : load(row, c);
      _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(pair.b, pair.a));
    }
  }
};

struct alignas(64) ByteIndices {
  uint8_t index[64];
};
constexpr ByteIndices every_other_byte(int first) {
  ByteIndices indices{};
  for (int i = 0; i < 64; ++i) indices.index[i] = static_cast<uint8_t>(2 * i + first);
  return indices;
}
constexpr ByteIndices kEvenBytes = every_other_byte(0);
constexpr ByteIndices kOddBytes = every_other_byte(1);

// FP8 by tables (VBMI) of the high and the low bytes of the 128 magnitudes times the scale, rounded
// to bf16: two lookups for 64 columns, where conversions through floats take three times as long.
// Tables cost as much as a few lookups, and rows of a tile mostly share the scale.
struct Fp8Tiles : Bytes<moe::Format::kFp8>, NaturalColumns {
  static constexpr bool kIsTileRow = false;
  static constexpr int64_t kPackedTokens = 8;

  struct Table {
    float scale = __builtin_nanf("");
    __m512i low[2];
    __m512i high[2];

    void fill(float with) {
      scale = with;
      const __m512i even = _mm512_load_si512(kEvenBytes.index);
      const __m512i odd = _mm512_load_si512(kOddBytes.index);
      for (int half = 0; half < 2; ++half) {
        __m512i words[2];
        for (int i = 0; i < 2; ++i) {
          const float* from = kE4m3Numbers.of + 64 * half + 32 * i;  // those without a sign
          words[i] = (__m512i)_mm512_cvtne2ps_pbh(V::mul(V::load(from + 16), V::set(with)),
                                                  V::mul(V::load(from), V::set(with)));
        }
        low[half] = _mm512_permutex2var_epi8(words[0], even, words[1]);
        high[half] = _mm512_permutex2var_epi8(words[0], odd, words[1]);
      }
    }
  };
  // Those of as many neighbouring blocks of columns as the widest panel has, by where the scale
  // lies: the same one for all rows of a block.
  struct State {
    Table tables[16];

    const Table& of(const float& scale) {
      Table& table = tables[reinterpret_cast<uintptr_t>(&scale) / sizeof scale % 16];
      if (table.scale != scale) table.fill(scale);
      return table;
    }
  };

  static void unpack(const Row& row, int64_t columns, std::byte* to, State& state) {
    constexpr int64_t kLine = 64;
    constexpr int kXorAnd = 0x78;  // a ^ (b & c): a scale may be negative too
    // So that halves of lanes, interleaved, are columns in their order.
    const __m512i quarters = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t c = 0; c < columns; c += kLine, to += 2 * kTileBytes) {
      const Table& table = state.of(row.scale[c >> row.shift]);
      const int64_t left = columns - c;
      const __m512i line = left < kLine
                               ? _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, row.weight + c)
                               : _mm512_loadu_si512(row.weight + c);
      const __m512i codes = _mm512_permutexvar_epi64(quarters, line);
      const __m512i low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
      const __m512i magnitude = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
      const __m512i high = _mm512_ternarylogic_epi64(
          magnitude, codes, _mm512_set1_epi8(static_cast<char>(0x80)), kXorAnd);
      _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
      if (left > kTileColumns) {
        _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi8(low, high));
      }
    }
  }
};

}  // namespace
