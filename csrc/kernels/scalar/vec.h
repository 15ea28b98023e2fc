// "Vectors" of one float: the reference that every other instruction set is tested beside, and the
// path taken on a CPU without AVX2.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/kernel.h"

namespace {

struct V {
  using F = float;
  static constexpr int kWidth = 1;
  static constexpr int kRows = 2;
  static constexpr int kStreamRows = 1;  // of quantised weights

  static F zero() { return 0.0f; }
  static F set(float value) { return value; }
  static F load(const float* p) { return *p; }
  static F load(const moe::Bf16* p) { return to_float(*p); }
  static F load(const moe::Fp16* p) { return to_float(*p); }
  static void store(float* p, F v) { *p = v; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  // As the vector instructions: an unordered pair gives the second.
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F abs(F a) { return a < 0.0f ? -a : a; }
  static F select_negative(F sign, F negative, F positive) {
    return sign < 0.0f ? negative : positive;
  }
  static F exp(F a) { return ::expf(a); }
  template <int kRows>
  static void sums(const F (&rows)[kRows], float* to) {
    for (int r = 0; r < kRows; ++r) to[r] = sum(rows[r]);
  }
  static float sum(F a) { return a; }

  static void store_scalar(float* p, float value) { *p = value; }
  // To nearest, ties to even; NaN stays NaN.
  static moe::Bf16 to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  }
  static float to_float(float value) { return value; }
  static float to_float(moe::Bf16 value) {
    return from_bits(static_cast<uint32_t>(value.bits) << 16);
  }
  static float to_float(moe::Fp16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // Moving the fields into place leaves the exponent 112 too small, subnormals included.
    const float magnitude = from_bits(rest << 13) * from_bits(0x77800000u);
    return sign ? -magnitude : magnitude;
  }

  // Weights come two vectors at a time.
  struct Pair {
    F a, b;
  };
  static Pair deinterleave(Pair natural) { return natural; }

  // The e4m3 loads of a set may leave out a factor, this one.
  static constexpr float kE4m3Scale = 1.0f;
  static Pair load_e4m3(const uint8_t* p) { return {e4m3_to_float(p[0]), e4m3_to_float(p[1])}; }
  static Pair load_int8(const int8_t* p) {
    return {static_cast<float>(p[0]), static_cast<float>(p[1])};
  }
  static Pair load_uint4(const uint8_t* p) {
    return {static_cast<float>(*p & 0xf), static_cast<float>(*p >> 4)};
  }
  static Pair load_e2m1(const uint8_t* p) { return {kE2m1[*p & 0xf], kE2m1[*p >> 4]}; }
  static F join_halves(F low, F) { return low; }

  static float e4m3_to_float(uint8_t code) {
    // As for fp16: the exponent is left 120 too small.
    const float magnitude = from_bits((code & 0x7fu) << 20) * from_bits(0x7b800000u);
    return (code & 0x80u) != 0 ? -magnitude : magnitude;
  }
  static uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  }
  static float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

 private:
  static constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
};

}  // namespace
