// What 4-bit codes stand for, as tables of bytes for VBMI's lookups.
#pragma once

#include "kernels/kernel.h"

namespace {

// The values of 16 codes, four times: a lookup reads six bits.
struct alignas(64) ByteTable {
  int8_t value[64];
};

// q - zero for each zero point.
struct Int4ByteTables {
  ByteTable of_zero[16];
};
constexpr Int4ByteTables int4_byte_tables() {
  Int4ByteTables tables{};
  for (int zero = 0; zero < 16; ++zero) {
    for (int i = 0; i < 64; ++i) tables.of_zero[zero].value[i] = static_cast<int8_t>(i % 16 - zero);
  }
  return tables;
}
constexpr Int4ByteTables kInt4ByteTables = int4_byte_tables();

// Twice e2m1's values, which are whole numbers.
constexpr ByteTable e2m1_byte_table() {
  constexpr int8_t kMagnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  ByteTable table{};
  for (int i = 0; i < 64; ++i) {
    const int8_t magnitude = kMagnitudes[i % 8];
    table.value[i] = i % 16 < 8 ? magnitude : static_cast<int8_t>(-magnitude);
  }
  return table;
}
constexpr ByteTable kE2m1Bytes = e2m1_byte_table();

}  // namespace
