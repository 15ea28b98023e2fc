// The scales of 128 columns of nibble_rows.h's formats, for each lane of 8 columns, with AVX-512.
// Of the last columns of a row, `count` are there: nothing is read past theirs.
#pragma once

#include "kernels/formats/nibble_rows.h"

namespace {

constexpr int64_t kLaneColumns = 128;

// For groups of fewer than 128 columns: the group of each word of four columns, and a mask of the
// groups that are there.
inline __m512i word_groups(const NibbleRow& row) {
  const __m512i numbers =
      _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13,
                       12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_srl_epi16(numbers, _mm_cvtsi64_si128(row.shift - 2));
}
inline __mmask8 groups_there(const NibbleRow& row, int64_t count) {
  const int64_t groups = (count + (int64_t{1} << row.shift) - 1) >> row.shift;
  return static_cast<__mmask8>((1u << groups) - 1);
}

// INT4's, which are bf16: of one group that has all the columns,
[[gnu::always_inline]] inline __m512 int4_scale(const NibbleRow& row, int64_t k) {
  uint16_t bits;
  __builtin_memcpy(&bits, row.scale + (k >> row.shift) * 2, sizeof bits);
  return (__m512)_mm512_set1_epi32(static_cast<int32_t>(uint32_t{bits} << 16));
}

// and of groups of fewer.
[[gnu::always_inline]] inline __m512 int4_scales(const NibbleRow& row, int64_t k, int64_t count) {
  // The odd words of floats whose even ones are zero.
  constexpr __mmask32 kHigh = 0xaaaaaaaa;
  const __m128i bits =
      _mm_maskz_loadu_epi16(groups_there(row, count), row.scale + (k >> row.shift) * 2);
  return (__m512)_mm512_maskz_permutexvar_epi16(kHigh, word_groups(row),
                                                _mm512_castsi128_si512(bits));
}

// Zero points of groups of fewer than 128 columns, as words.
[[gnu::always_inline]] inline __m128i int4_zeros(const NibbleRow& row, int64_t k, int64_t count) {
  const __m128i bytes = _mm_cvtepu8_epi16(
      _mm_maskz_loadu_epi8(groups_there(row, count), row.zero + (k >> row.shift)));
  return _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi64_si128(row.zero_bits)), _mm_set1_epi16(0xf));
}

// Four exponents of 32 columns, which are four lanes each: turned to where a float has its own.
[[gnu::always_inline]] inline __m512 mxfp4_scales(const NibbleRow& row, int64_t k, int64_t count) {
  int32_t exponents = 0;
  if (count == kLaneColumns) {
    __builtin_memcpy(&exponents, row.scale + (k >> 5), sizeof exponents);
  } else {
    __builtin_memcpy(&exponents, row.scale + (k >> 5), static_cast<size_t>((count + 31) / 32));
  }
  const __m512i turns =
      _mm512_setr_epi32(23, 23, 23, 23, 15, 15, 15, 15, 7, 7, 7, 7, 31, 31, 31, 31);
  return (__m512)_mm512_and_si512(_mm512_rolv_epi32(_mm512_set1_epi32(exponents), turns),
                                  _mm512_set1_epi32(0x7f800000));
}

// Eight e4m3 scales of 16 columns, which are two lanes each. Through fp16, see avx2/vec.h.
[[gnu::always_inline]] inline __m512 nvfp4_scales(const NibbleRow& row, int64_t k, int64_t count) {
  int64_t codes = 0;
  if (count == kLaneColumns) {
    __builtin_memcpy(&codes, row.scale + (k >> 4), sizeof codes);
  } else {
    __builtin_memcpy(&codes, row.scale + (k >> 4), static_cast<size_t>((count + 15) / 16));
  }
  const __m128i wide = _mm_cvtepi8_epi16(_mm_cvtsi64_si128(codes));
  const __m128i half =
      _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  const __m256 scales =
      _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(V::kE4m3Scale * row.global));
  const __m512i each = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(each, _mm512_castps256_ps512(scales));
}

}  // namespace
