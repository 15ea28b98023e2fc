// The formats of nibble_rows.h as rows of tiles: a table of the 16 scaled values, rounded to bf16
// once for all the columns that share a scale, and for each 32 columns a broadcast, a shift and a
// permutation. So unpacking costs a quarter of what it does through floats.
//
// A broadcast gives each 128-bit lane the 8 words of 32 columns, the shift a nibble of each word to
// the low bits: nibble 0 in the first lane, 3 in the last. So position 8 n + w has column 4 w + n.
#pragma once

#include "kernels/amx/tiles.h"
#include "kernels/formats/nibble_floats.h"

namespace {

struct NibbleColumns {
  static constexpr int64_t column(int64_t position) { return position % 8 * 4 + position / 8; }
  static __m512i arrange_columns(__m512i row) {
    const __m512i columns =
        _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17,
                         13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    return _mm512_permutexvar_epi16(columns, row);
  }
};

inline __m256i scaled(__m512 values, float scale) {
  return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(values, V::set(scale)));
}

// F gives from how many tokens on tiles are faster than nibble_quads.h, rows, `table` for the
// columns from k on, of which `left` are there, and how many share it.
template <class F>
struct NibbleTiles : F, NibbleColumns {
  static constexpr bool kIsTileRow = false;
  static constexpr int64_t kPackedTokens = F::kLeastTokens;

  using State = NoState;
  static void unpack(const NibbleRow& row, int64_t columns, std::byte* to, State&) {
    const __m512i shifts =
        _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                         0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
    const int64_t shared = F::table_columns(row);  // a power of two
    __m512i table = _mm512_setzero_si512();
    for (int64_t c = 0; c < columns; c += kTileColumns, to += kTileBytes) {
      const int64_t left = columns - c;
      if ((c & (shared - 1)) == 0) table = F::table(row, c, left);
      const auto* from = reinterpret_cast<const __m128i*>(row.weight + c / 2);
      const __m128i words = left < kTileColumns ? _mm_loadl_epi64(from) : _mm_loadu_si128(from);
      const __m512i codes = F::codes(_mm512_srlv_epi16(_mm512_broadcast_i32x4(words), shifts));
      _mm512_store_si512(to, _mm512_permutexvar_epi16(codes, table));
    }
  }
};

// One table for all 32 columns: twice, so that what is above a nibble need not be masked.
struct OneTileTable {
  static constexpr int64_t kLeastTokens = 10;
  static __m512i codes(__m512i nibbles) { return nibbles; }
  static __m512i twice(__m256i table) { return _mm512_broadcast_i64x4(table); }
};

struct Int4Tiles : Int4Rows<moe::Bf16>, OneTileTable {
  static int64_t table_columns(const NibbleRow& row) { return int64_t{1} << row.shift; }
  static __m512i table(const NibbleRow& row, int64_t k, int64_t) {
    const int64_t group = k >> row.shift;
    const V::F values = V::sub(V::load(kIntegers), V::set(kIntegers[zero(row, group)]));
    return twice(scaled(values, scale(row, group)));
  }
};

struct Mxfp4Tiles : Mxfp4Rows, OneTileTable {
  static int64_t table_columns(const NibbleRow&) { return kTileColumns; }
  static __m512i table(const NibbleRow& row, int64_t k, int64_t) {
    return twice(scaled(V::e2m1_values(), scale(row, k)));
  }
};

// A table for either 16 columns: the second for words 4 to 7 of each lane.
struct Nvfp4Tiles : Nvfp4Rows {
  static constexpr int64_t kLeastTokens = 16;
  static int64_t table_columns(const NibbleRow&) { return kTileColumns; }
  static __m512i table(const NibbleRow& row, int64_t k, int64_t left) {
    const __m256i first = scaled(V::e2m1_values(), scale(row, k));
    const __m256i second = scaled(V::e2m1_values(), left > 16 ? scale(row, k + 16) : 0.0f);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
  static __m512i codes(__m512i nibbles) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    return _mm512_ternarylogic_epi64(nibbles, _mm512_set1_epi16(0xf),
                                     _mm512_broadcast_i32x4(_mm_set_epi64x(0x0010001000100010, 0)),
                                     kAndOr);
  }
};

}  // namespace
