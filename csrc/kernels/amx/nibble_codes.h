// The formats of nibble_rows.h as rows of 8-bit tiles, for digits.h's operands: codes become the
// small whole numbers that they stand for, and scales multiply the results.
//
// The 32 bytes of 64 columns are broadcast to both halves of a vector, of which the second is
// shifted by a nibble: so the first has the even columns in its low nibbles, the second the odd
// ones. A table of the 16 values, four times, looks them up (VBMI): six bits are read, and what is
// above a nibble need not be masked. Two instructions for 64 codes, loads and stores aside.
#pragma once

#include "kernels/amx/digits.h"
#include "kernels/formats/nibble_rows.h"
#include "kernels/formats/nibble_tables.h"

namespace {

// Of 64 columns from k on, of which `left` are there.
[[gnu::always_inline]] inline __m512i load_nibbles(const NibbleRow& row, int64_t k, int64_t left) {
  const __m512i shifts = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004,
                                          0x0004000400040004, 0x0004000400040004, 0, 0, 0, 0);
  const auto* from = reinterpret_cast<const __m256i*>(row.weight + k / 2);
  const __m256i bytes =
      left >= kCodeColumns
          ? _mm256_loadu_si256(from)
          : _mm256_maskz_loadu_epi8(static_cast<__mmask32>((1u << (left + 1) / 2) - 1), from);
  return _mm512_srlv_epi16(_mm512_broadcast_i64x4(bytes), shifts);
}

struct NibbleColumnOrder {
  static constexpr int64_t kBits = 4;
  static constexpr ByteIndices kOrder =
      low_bytes([](int i) { return i < 32 ? 2 * i : 2 * i - 63; });
};

// Those of a group of the 64 columns.
template <int kGroups>
constexpr __mmask64 group_bytes(int group) {
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) {
    if (i % 32 * kGroups / 32 == group) mask |= uint64_t{1} << i;
  }
  return mask;
}

template <int kColumnsShift, bool kZeros>
struct Int4Codes : Int4Rows<moe::Bf16>, NibbleColumnOrder {
  static constexpr int kShift = kColumnsShift;
  static constexpr float kUnit = 1.0f;

  [[gnu::always_inline]] static __m512i codes(const NibbleRow& row, int64_t k, int64_t left) {
    const __m512i nibbles = load_nibbles(row, k, left);
    if constexpr (kZeros) {
      constexpr int kGroups = kGroupsOfTile<kShift>;
      __m512i values = _mm512_permutexvar_epi8(nibbles, table(row, k >> kShift));
#pragma GCC unroll 2
      for (int g = 1; g < kGroups; ++g) {
        if (left <= int64_t{g} << kShift) break;
        values = _mm512_mask_permutexvar_epi8(values, group_bytes<kGroups>(g), nibbles,
                                              table(row, (k >> kShift) + g));
      }
      return values;
    } else {
      return _mm512_permutexvar_epi8(nibbles, _mm512_load_si512(kInt4ByteTables.of_zero[8].value));
    }
  }
  static void scales(const NibbleRow& row, int64_t k, int64_t groups, float* to) {
    const auto* from = reinterpret_cast<const moe::Bf16*>(row.scale) + (k >> kShift);
    for (int64_t i = 0; i < groups; i += kTile) V::store(to + i, load_elements(from, i, groups));
  }

 private:
  [[gnu::always_inline]] static __m512i table(const NibbleRow& row, int64_t group) {
    return _mm512_load_si512(kInt4ByteTables.of_zero[stored_zero(row, group)].value);
  }
};

struct AnyInt4Codes {
  template <class Do>
  static auto choose(const moe::Matrix& matrix, const Do& with) {
    const auto of = [&]<bool kZeros>() {
      switch (matrix.scale_shift) {
        case 5:
          return with.template operator()<Int4Codes<5, kZeros>>();
        case 6:
          return with.template operator()<Int4Codes<6, kZeros>>();
        default:
          return with.template operator()<Int4Codes<7, kZeros>>();
      }
    };
    return matrix.zero != nullptr ? of.template operator()<true>()
                                  : of.template operator()<false>();
  }
};

// One byte a scale: sixteen of them from `group` on of so many.
inline __m128i load_scale_bytes(const std::byte* scales, int64_t group, int64_t groups) {
  return _mm_maskz_loadu_epi8(elements_there(group, groups), scales + group);
}

template <class F>
struct E2m1Codes : NibbleColumnOrder {
  static constexpr float kUnit = 0.5f;

  [[gnu::always_inline]] static __m512i codes(const NibbleRow& row, int64_t k, int64_t left) {
    return _mm512_permutexvar_epi8(load_nibbles(row, k, left), _mm512_load_si512(kE2m1Bytes.value));
  }
  static void scales(const NibbleRow& row, int64_t k, int64_t groups, float* to) {
    const std::byte* from = row.scale + (k >> F::kShift);
    for (int64_t i = 0; i < groups; i += kTile) {
      V::store(to + i, F::scale_values(row, load_scale_bytes(from, i, groups)));
    }
  }
  template <class Do>
  static auto choose(const moe::Matrix&, const Do& with) {
    return with.template operator()<F>();
  }
};

struct Mxfp4Codes : Mxfp4Rows, E2m1Codes<Mxfp4Codes> {
  static constexpr int kShift = 5;
  static __m512 scale_values(const NibbleRow&, __m128i exponents) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu8_epi32(exponents), 23);
  }
};

struct Nvfp4Codes : Nvfp4Rows, E2m1Codes<Nvfp4Codes> {
  static constexpr int kShift = 4;
  // Through fp16, see avx2/vec.h.
  static __m512 scale_values(const NibbleRow& row, __m128i codes) {
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                          _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), V::set(V::kE4m3Scale * row.global));
  }
};

}  // namespace
