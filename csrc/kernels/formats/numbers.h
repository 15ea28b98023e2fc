// What the codes of small formats stand for, as floats.
#pragma once

#include <cstdint>

namespace {

// Numbers by their codes. Read from here they are operands of vector instructions; converted, each
// would take two of those.
struct Numbers {
  float of[256];
};
constexpr Numbers e4m3_numbers() {
  Numbers numbers{};
  for (int i = 0; i < 256; ++i) {
    const int exponent = i >> 3 & 0xf;
    const auto mantissa = static_cast<float>(exponent == 0 ? i & 7 : (i & 7) + 8);
    const auto power = static_cast<uint32_t>(127 - 10 + (exponent == 0 ? 1 : exponent)) << 23;
    numbers.of[i] = (i < 128 ? mantissa : -mantissa) * __builtin_bit_cast(float, power);
  }
  return numbers;
}
constexpr Numbers kE4m3Numbers = e4m3_numbers();

}  // namespace
