// FP8 of bytes.h by bf16 operands, see strided_pairs.h.
#pragma once

#include "kernels/formats/bytes.h"
#include "kernels/formats/strided_pairs.h"

namespace {

// What turns e4m3's exponent into bf16's, as bits: added to a code's exponent and mantissa where
// they are in bf16.
constexpr uint16_t kE4m3Bias = 120 << 7;

// The same for codes with exponent 0, by mantissa: those are mantissa * 2^-9.
struct alignas(64) SubnormalTable {
  uint16_t bias[32];
};
constexpr SubnormalTable subnormal_table() {
  SubnormalTable table{};
  for (int i = 0; i < 8; ++i) {
    const auto value = __builtin_bit_cast(uint32_t, static_cast<float>(i) / 512.0f);
    table.bias[i] = static_cast<uint16_t>((value >> 16) - (static_cast<uint32_t>(i) << 4));
  }
  return table;
}
constexpr SubnormalTable kSubnormals = subnormal_table();

struct Fp8Pairs : StridedPairs<2> {
  using Codes = Bytes<moe::Format::kFp8>;
  using Row = Codes::Row;
  [[gnu::always_inline]] static Row row(const moe::Matrix& m, int64_t expert, int64_t index,
                                        int64_t k) {
    return Codes::row(m, expert, index, k);
  }
  static const std::byte* address(const Row& row, int64_t k) { return Codes::address(row, k); }
  [[gnu::always_inline]] static Weights load(const Row& row, int64_t k) {
    return decode(row, words(row.weight + k), k);
  }
  static Weights load_tail(const Row& row, int64_t k, int64_t count) {
    return decode(row, words(row.weight + k, count), k);
  }

 private:
  [[gnu::always_inline]] static Weights decode(const Row& row, __m512i words, int64_t k) {
    const __mmask32 even = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x0078));
    const __mmask32 odd = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7800));
    return {{values(_mm512_slli_epi16(words, 8), even, words),
             values(words, odd, _mm512_srli_epi16(words, 8))},
            V::set(row.scale[k >> row.shift])};
  }
  // Codes in the high bytes; `mantissas` are the low five bits where the exponent is 0.
  [[gnu::always_inline]] static __m512bh values(__m512i codes, __mmask32 subnormal,
                                                __m512i mantissas) {
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi16(codes, 4),
                                          _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
    const __m512i bias = _mm512_mask_permutexvar_epi16(
        _mm512_set1_epi16(kE4m3Bias), subnormal, mantissas, _mm512_load_si512(kSubnormals.bias));
    return (__m512bh)_mm512_add_epi16(bits, bias);
  }
};

}  // namespace
