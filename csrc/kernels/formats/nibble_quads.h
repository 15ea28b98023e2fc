// The formats of nibble_rows.h by row_quads.h. A row's 64 bytes are 16 numbers of 32 bits; vector v
// has those of 4 g + v of each row, for lane g: so a lane's sum is of 32 columns that follow each
// other, in low nibbles the even ones, in high nibbles the odd ones.
#pragma once

#include "kernels/formats/nibble_rows.h"
#include "kernels/formats/row_quads.h"

namespace {

struct NibbleQuadRows {
  static constexpr int64_t kBlockBytes = kQuadColumns / 2;
  static constexpr int kCodes = 2;
  static constexpr bool kHasZeros = false;
  static constexpr DigitOrder kOrder = [] {
    DigitOrder order{};
    for (int at = 0; at < kQuadColumns; ++at) {
      const int vector = at / 32, odd = at / 16 % 2, lane = at / 4 % 4, byte = at % 4;
      order.column[at] = static_cast<uint8_t>(32 * lane + 8 * vector + 2 * byte + odd);
    }
    return order;
  }();

  // Vectors 0 and 1, or 2 and 3.
  [[gnu::always_inline]] static void pair(const __m512i (&rows)[4], int which, __m512i (&to)[2]) {
    const __m512i first =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second =
        _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    const __m512i numbers = which == 0 ? first : second;
    const __m512i low = _mm512_permutex2var_epi32(rows[0], numbers, rows[1]);
    const __m512i high = _mm512_permutex2var_epi32(rows[2], numbers, rows[3]);
    to[0] = _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
    to[1] = _mm512_shuffle_i64x2(low, high, 0xee);
  }

 protected:
  // `there` bytes, at most eight, as a number.
  template <class Number>
  [[gnu::always_inline]] static Number take(const std::byte* from, int64_t there) {
    Number number = 0;
    if (there >= static_cast<int64_t>(sizeof number)) {
      __builtin_memcpy(&number, from, sizeof number);
    } else {
      __builtin_memcpy(&number, from, static_cast<size_t>(there));
    }
    return number;
  }

  // Four bytes of each row, after one another.
  template <class Of>
  [[gnu::always_inline]] static __m128i four_each(const Of& of) {
    return _mm_setr_epi32(static_cast<int32_t>(of(0)), static_cast<int32_t>(of(1)),
                          static_cast<int32_t>(of(2)), static_cast<int32_t>(of(3)));
  }
  template <class Of>
  [[gnu::always_inline]] static __m256i eight_each(const Of& of) {
    return _mm256_setr_epi64x(static_cast<int64_t>(of(0)), static_cast<int64_t>(of(1)),
                              static_cast<int64_t>(of(2)), static_cast<int64_t>(of(3)));
  }
};

// INT4: scales are of the activations' dtype, which is bf16 here. Codes are what is stored, 8 too
// much; zero points are counted from there.
template <int kShift, bool kZeros>
struct Int4Quads : Int4Rows<moe::Bf16>, NibbleQuadRows {
  static constexpr int kParts = 1;
  static constexpr int kZero = 8;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHasZeros = kZeros;

  [[gnu::always_inline]] static __m512i code(__m512i bytes, int odd) {
    return _mm512_and_si512(odd == 0 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(0x0f));
  }

  [[gnu::always_inline]] static void scales(const NibbleRow* rows, int64_t k, int64_t count,
                                            V::F (&to)[1]) {
    const int64_t there = 2 * groups(count);
    const auto of = [&](int r) { return rows[r].scale + (k >> kShift) * 2; };
    if constexpr (kShift == 7) {
      uint64_t words = 0;
      for (int r = 0; r < 4; ++r) words |= uint64_t{take<uint16_t>(of(r), 2)} << 16 * r;
      // Each to the high half of its row's four floats.
      const __m512i places = _mm512_set_epi64(
          0x0706808007068080, 0x0706808007068080, 0x0504808005048080, 0x0504808005048080,
          0x0302808003028080, 0x0302808003028080, 0x0100808001008080, 0x0100808001008080);
      to[0] = _mm512_castsi512_ps(
          _mm512_shuffle_epi8(_mm512_set1_epi64(static_cast<int64_t>(words)), places));
    } else if constexpr (kShift == 6) {
      const __m512i places = _mm512_set_epi64(
          0x0f0e80800f0e8080, 0x0d0c80800d0c8080, 0x0b0a80800b0a8080, 0x0908808009088080,
          0x0706808007068080, 0x0504808005048080, 0x0302808003028080, 0x0100808001008080);
      const __m128i words = four_each([&](int r) { return take<uint32_t>(of(r), there); });
      to[0] = _mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(words), places));
    } else {
      const __m256i words = eight_each([&](int r) { return take<uint64_t>(of(r), there); });
      to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    }
  }

  // By which a sum's start, which is of zero points of 8, is short.
  [[gnu::always_inline]] static V::F zeros(const NibbleRow* rows, int64_t k, int64_t count) {
    const __m128i bytes = four_each([&](int r) {
      const uint32_t stored = take<uint32_t>(rows[r].zero + (k >> kShift), groups(count));
      const uint32_t of_groups = stored >> rows[r].zero_bits & 0x0f0f0f0f;
      if constexpr (kShift == 7) return (of_groups & 0xff) * 0x01010101;
      if constexpr (kShift == 6) {
        return (of_groups & 0xff) * 0x0101 | (of_groups >> 8 & 0xff) * 0x01010000;
      }
      return of_groups;
    });
    const V::F values = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    return V::fma(values, V::set(1.0f / kZero), V::set(-1.0f));
  }

 private:
  static int64_t groups(int64_t count) { return (count + (1 << kShift) - 1) >> kShift; }
};

// Any of these, by what a matrix has: decided for a product, not for each of its steps.
struct AnyInt4Quads : Int4Quads<7, false> {
  template <class Do>
  static void choose(const moe::Matrix& matrix, const Do& with) {
    const auto of = [&]<bool kZeros>() {
      switch (matrix.scale_shift) {
        case 5:
          return with.template operator()<Int4Quads<5, kZeros>>();
        case 6:
          return with.template operator()<Int4Quads<6, kZeros>>();
        default:
          return with.template operator()<Int4Quads<7, kZeros>>();
      }
    };
    return matrix.zero != nullptr ? of.template operator()<true>()
                                  : of.template operator()<false>();
  }
};

// Twice e2m1's values, and 12 more, four times: a lookup reads six bits.
struct alignas(64) E2m1Codes {
  uint8_t value[64];
};
constexpr E2m1Codes e2m1_codes(int more) {
  constexpr int kMagnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  E2m1Codes codes{};
  for (int i = 0; i < 64; ++i) {
    const int magnitude = kMagnitudes[i % 8];
    codes.value[i] = static_cast<uint8_t>(more + (i % 16 < 8 ? magnitude : -magnitude));
  }
  return codes;
}

struct E2m1Quads : NibbleQuadRows {
  static constexpr int kZero = 12;
  static constexpr float kUnit = 0.5f;
  static constexpr E2m1Codes kValues = e2m1_codes(kZero);

  [[gnu::always_inline]] static __m512i code(__m512i bytes, int odd) {
    return _mm512_permutexvar_epi8(odd == 0 ? bytes : _mm512_srli_epi16(bytes, 4),
                                   _mm512_load_si512(kValues.value));
  }
};

struct Mxfp4Quads : Mxfp4Rows, E2m1Quads {
  static constexpr int kParts = 1;

  [[gnu::always_inline]] static void scales(const NibbleRow* rows, int64_t k, int64_t count,
                                            V::F (&to)[1]) {
    const __m128i exponents = four_each(
        [&](int r) { return take<uint32_t>(rows[r].scale + (k >> 5), (count + 31) / 32); });
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(exponents), 23));
  }
  template <class Do>
  static void choose(const moe::Matrix&, const Do& with) {
    with.template operator()<Mxfp4Quads>();
  }
};

// A lane's first two vectors are one group of 16 columns, the other two the next.
struct Nvfp4Quads : Nvfp4Rows, E2m1Quads {
  static constexpr int kParts = 2;

  [[gnu::always_inline]] static void scales(const NibbleRow* rows, int64_t k, int64_t count,
                                            V::F (&to)[2]) {
    const __m256i codes = eight_each(
        [&](int r) { return take<uint64_t>(rows[r].scale + (k >> 4), (count + 15) / 16); });
    // Through fp16, see avx2/vec.h.
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7),
                                            _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
    const V::F unit = V::set(V::kE4m3Scale * rows[0].global);
    to[0] = V::mul(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)), unit);
    to[1] = V::mul(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(halves, 16))), unit);
  }
  template <class Do>
  static void choose(const moe::Matrix&, const Do& with) {
    with.template operator()<Nvfp4Quads>();
  }
};

}  // namespace
