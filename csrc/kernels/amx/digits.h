// The operands of few tokens for products of 8-bit tiles: a token's activations as whole numbers of
// 16 bits, relative to the largest of them, in two signed digits. Where most of them, beside one
// that is much larger, would be left with few bits, two more digits have what was rounded away. So
// what tiles multiply and add is exact, and a sum is the same whatever comes with it.
//
// A row of a weights' tile has 64 codes, in an order that is the format's, of kGroups groups that
// have a scale each (the order is that of nibble_codes.h then, even columns first). A product adds
// up all 64: so a column of the result is a token's digit of one group, whose operands are zero in
// the others' columns. A block is as many tokens as fill the 16 columns of a tile,
// [token][digit][group]; of 128 columns, which are a cache line of a row of weights, it has two
// tiles, and behind all of these as many of what was rounded away.
#pragma once

#include <type_traits>

#include "kernels/amx/pack.h"

namespace {

constexpr int64_t kCodeColumns = 64;   // of a tile
constexpr int64_t kLineColumns = 128;  // of two
constexpr int64_t kLineBytes = kLineColumns / kCodeColumns * kTileBytes;

// For scales of 2^kShift columns each.
template <int kShift>
constexpr int kGroupsOfTile = kShift < 6 ? 1 << (6 - kShift) : 1;
template <int kGroups>
constexpr int64_t kDigitTokens = kTile / (2 * kGroups);

inline int64_t line_count(int64_t columns) { return (columns + kLineColumns - 1) / kLineColumns; }

// Columns that a group's blocks have: tiles of few tokens are narrower, which leaves less to read.
template <int kGroups>
inline int64_t operand_columns(const moe::Group& group) {
  constexpr int64_t kMost = kDigitTokens<kGroups>;
  return 2 * kGroups * (group.count < kMost ? group.count : kMost);
}

struct DigitBlock {
  // What comes first.
  struct alignas(64) Header {
    float unit[kTile / 2];  // what 1 stands for, of each token
    bool has_rests;
  };
  static_assert(sizeof(Header) == moe::kPackedHeaderBytes);

  std::byte* at;
  int64_t lines;
  int64_t columns;

  Header& header() const { return *reinterpret_cast<Header*>(at); }
  int64_t row_bytes() const { return 4 * columns; }
  int64_t line_bytes() const { return 2 * kTile * row_bytes(); }
  std::byte* digits() const { return at + sizeof(Header); }
  std::byte* rests() const { return digits() + lines * line_bytes(); }
};

// Block `index` of the packed ones of rows of so many columns.
template <int kGroups>
inline DigitBlock digit_block(std::byte* packed, const moe::Group& group, int64_t row_columns,
                              int64_t index) {
  static_assert(kLineColumns == moe::kOperandAlign);
  static_assert(2 * kLineBytes == kLineColumns * moe::kPackedColumnBytes);
  std::byte* block =
      packed_blocks(packed, group, row_columns) + index * packed_block_bytes(row_columns);
  return {block, line_count(row_columns), operand_columns<kGroups>(group)};
}

// Sixteen elements from `k` on of a row of so many; zeros past its end.
inline __mmask16 elements_there(int64_t k, int64_t columns) {
  const int64_t left = columns - k;
  return static_cast<__mmask16>(left >= kTile ? 0xffff : left > 0 ? (1u << left) - 1 : 0);
}
inline __m512 load_elements(const float* row, int64_t k, int64_t columns) {
  return _mm512_maskz_loadu_ps(elements_there(k, columns), row + k);
}
inline __m512 load_elements(const moe::Bf16* row, int64_t k, int64_t columns) {
  const __m256i bits = _mm256_maskz_loadu_epi16(elements_there(k, columns), row + k);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Of 64 columns' words, the low bytes: of column_at(0), column_at(1), ...
template <class ColumnAt>
constexpr ByteIndices low_bytes(const ColumnAt& column_at) {
  ByteIndices indices{};
  for (int i = 0; i < 64; ++i) indices.index[i] = static_cast<uint8_t>(2 * column_at(i));
  return indices;
}

// Of 64 columns: numbers are 256 high + low.
struct DigitPair {
  __m512i high;
  __m512i low;
};

// The largest number of two signed digits.
constexpr float kMostDigits = 127.0f * 256.0f + 127.0f;
// What 1 of the rests is: half of 1, the most that rounding takes, is their largest number.
constexpr float kRestUnit = 0.5f / kMostDigits;

// A token's row in whole numbers.
template <class Element>
class WholeRow {
 public:
  WholeRow() = default;
  WholeRow(const Element* row, int64_t columns) : row_(row), columns_(columns) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < columns; k += kTile) {
      // As whole numbers, so that NaN is the largest.
      most = _mm512_max_epi32(most, (__m512i)_mm512_abs_ps(load_elements(row, k, columns)));
    }
    const int32_t bits = _mm512_reduce_max_epi32(most);
    is_infinite_ = bits == 0x7f800000;
    const float size = V::from_bits(static_cast<uint32_t>(bits));
    const float largest = size < 1e-30f ? 1e-30f : size;
    factor_ = kMostDigits / largest;
    unit_ = largest / kMostDigits;
    has_rests_ = !is_infinite_ && needs_rests();
  }

  float unit() const { return unit_; }
  bool has_rests() const { return has_rests_; }

  // Of the 64 columns from k on, in the order of the codes.
  DigitPair digits(int64_t k, const ByteIndices& order) const {
    return digits_of(order, [&](int64_t i) { return scaled(k + i); });
  }
  // What was rounded away, by kRestUnit.
  DigitPair rests(int64_t k, const ByteIndices& order) const {
    return digits_of(order, [&](int64_t i) {
      const __m512 value = scaled(k + i);
      const __m512 rest = _mm512_sub_ps(value, _mm512_cvtepi32_ps(_mm512_cvtps_epi32(value)));
      return _mm512_mul_ps(rest, V::set(1.0f / kRestUnit));
    });
  }

 private:
  __m512 scaled(int64_t k) const {
    const __m512 value = load_elements(row_, k, columns_);
    if (!is_infinite_) return _mm512_mul_ps(value, V::set(factor_));
    // Beside infinity the others are nothing; by the factor, which is 0 then, it would be NaN.
    const __mmask16 infinite =
        _mm512_cmp_ps_mask(_mm512_abs_ps(value), V::set(__builtin_inff()), _CMP_EQ_OQ);
    return _mm512_maskz_mov_ps(infinite,
                               _mm512_or_ps(_mm512_and_ps(value, V::set(-0.0f)), V::set(1.0f)));
  }

  // Of values_at(i), 16 from the i-th of 64 on, rounded.
  template <class ValuesAt>
  static DigitPair digits_of(const ByteIndices& order, const ValuesAt& values_at) {
    const auto words = [&](int64_t i) {
      const __m256i low = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(values_at(i)));
      const __m256i high = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(values_at(i + kTile)));
      return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    // A low digit is the low byte, as a signed one: what it leaves is the high digit.
    const auto high = [](__m512i word) {
      return _mm512_srli_epi16(_mm512_add_epi16(word, _mm512_set1_epi16(128)), 8);
    };
    const __m512i first = words(0);
    const __m512i second = words(2 * kTile);
    const __m512i bytes = _mm512_load_si512(order.index);
    return {_mm512_permutex2var_epi8(high(first), bytes, high(second)),
            _mm512_permutex2var_epi8(first, bytes, second)};
  }

  // Whether most of them, zeros aside, have less than 7 bits of the 15. What is lost of a few is
  // lost among the others.
  bool needs_rests() const {
    int64_t there = 0;
    int64_t small = 0;
    for (int64_t k = 0; k < columns_; k += kTile) {
      const __m512 size = _mm512_abs_ps(scaled(k));
      const __mmask16 any = _mm512_cmp_ps_mask(size, V::zero(), _CMP_GT_OQ);
      there += __builtin_popcount(any);
      small += __builtin_popcount(_mm512_mask_cmp_ps_mask(any, size, V::set(128.0f), _CMP_LT_OQ));
    }
    return 2 * small > there;
  }

  const Element* row_;
  int64_t columns_;
  bool is_infinite_;
  bool has_rests_;
  float factor_;
  float unit_;
};

// The rows of a tile, four columns each, that are of one of its groups: the first rows have even
// columns, the others odd ones.
template <int kGroups>
constexpr __mmask16 group_rows(int group) {
  unsigned mask = 0;
  for (int row = 0; row < 16; ++row) {
    if (row % 8 * kGroups / 8 == group) mask |= 1u << row;
  }
  return static_cast<__mmask16>(mask);
}

// The tiles of 128 columns: digits_at(t, k) gives two digits of a token's 64 columns from k on.
template <int kGroups, class DigitsAt>
inline void pack_line(const DigitsAt& digits_at, int64_t tokens, int64_t k, const DigitBlock& block,
                      std::byte* to) {
  const auto columns = static_cast<__mmask16>((1u << block.columns) - 1);
  for (int64_t end = k + kLineColumns; k < end; k += kCodeColumns) {
    __m512i lanes[16] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      const DigitPair digits = digits_at(t, k);
      for (int g = 0; g < kGroups; ++g) {
        const __mmask16 rows = group_rows<kGroups>(g);
        lanes[2 * kGroups * t + g] = _mm512_maskz_mov_epi32(rows, digits.high);
        lanes[2 * kGroups * t + kGroups + g] = _mm512_maskz_mov_epi32(rows, digits.low);
      }
    }
    transpose(lanes);
    for (int64_t i = 0; i < kTile; ++i, to += block.row_bytes()) {
      _mm512_mask_storeu_epi32(to, columns, lanes[i]);
    }
  }
}

// The rows of a block's tokens, row_at(t), each of so many columns.
template <int kGroups, class RowAt>
inline void pack_digits(const RowAt& row_at, int64_t tokens, int64_t columns,
                        const ByteIndices& order, const DigitBlock& block) {
  using Row = WholeRow<std::remove_cvref_t<decltype(*row_at(0))>>;
  DigitBlock::Header& header = block.header();
  header = {};
  Row rows[kDigitTokens<kGroups>];
  for (int64_t t = 0; t < tokens; ++t) {
    rows[t] = Row(row_at(t), columns);
    header.unit[t] = rows[t].unit();
    header.has_rests = header.has_rests || rows[t].has_rests();
  }
  for (int64_t line = 0; line < block.lines; ++line) {
    const auto digits = [&](int64_t t, int64_t k) { return rows[t].digits(k, order); };
    const int64_t at = line * block.line_bytes();
    pack_line<kGroups>(digits, tokens, line * kLineColumns, block, block.digits() + at);
    if (!header.has_rests) continue;
    // Nothing of tokens that have none: their sums are what they are by themselves.
    const auto rests = [&](int64_t t, int64_t k) {
      if (rows[t].has_rests()) return rows[t].rests(k, order);
      return DigitPair{_mm512_setzero_si512(), _mm512_setzero_si512()};
    };
    pack_line<kGroups>(rests, tokens, line * kLineColumns, block, block.rests() + at);
  }
}

}  // namespace
