// The products of few tokens (amx/few_tokens.h) on any CPU with VNNI and VBMI: over emulated tiles,
// against doubles, with weights and scales that end where a page does. Built with the kernels'
// flags, so nothing here is an inline function that another file could share (see kernels/body.h).
#include <sys/mman.h>

#include <initializer_list>

#include "kernels/avx512/vec.h"
// vec.h comes first.
#include "kernels/activation.h"
#include "kernels/amx/byte_codes.h"
#include "kernels/amx/few_tokens.h"
#include "kernels/amx/nibble_codes.h"

namespace moe_tests {

void report(bool good, const char* what);  // in engine_test.cpp

}  // namespace moe_tests

namespace {

using moe_tests::report;

struct Random {
  uint64_t state = 1;
  uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  }
  float uniform() { return static_cast<float>(bits() % 65536) / 32768.0f - 1.0f; }
};

// Zeros, with a page behind them that may not be read.
template <class T>
class Memory {
 public:
  explicit Memory(int64_t count) : bytes_(count * static_cast<int64_t>(sizeof(T))) {
    whole_ = (bytes_ + kPage - 1) / kPage * kPage;
    void* const at = mmap(nullptr, static_cast<size_t>(whole_ + kPage), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = static_cast<std::byte*>(at);
    mprotect(base_ + whole_, kPage, PROT_NONE);
  }
  ~Memory() { munmap(base_, static_cast<size_t>(whole_ + kPage)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  T* data() const { return reinterpret_cast<T*>(base_ + whole_ - bytes_); }

 private:
  static constexpr int64_t kPage = 4096;
  std::byte* base_;
  int64_t bytes_;
  int64_t whole_;
};

enum class Kind { kNormal, kLargeOnes, kTiny, kZeros, kKinds };

// `row` of activations: where they are large, weights are to be nothing.
bool is_large(Kind kind, int64_t k) { return kind == Kind::kLargeOnes && k % 8 == 0; }
void fill(Kind kind, int64_t columns, float* row, Random& random) {
  for (int64_t k = 0; k < columns; ++k) {
    row[k] = kind == Kind::kZeros  ? 0.0f
             : is_large(kind, k)   ? 1e4f
             : kind == Kind::kTiny ? 1e-20f * random.uniform()
                                   : random.uniform();
  }
}

// Digits are the nearest whole number, and rests what it leaves.
void test_digits_of(Kind kind, int64_t columns, Random& random) {
  const Memory<float> x(columns);
  fill(kind, columns, x.data(), random);
  const WholeRow<float> row(x.data(), columns);
  report(row.has_rests() == (kind == Kind::kLargeOnes), "rests beside large ones");
  for (int64_t k = 0; k < columns; k += kCodeColumns) {
    int8_t high[64], low[64], rest_high[64], rest_low[64];
    const DigitPair digits = row.digits(k, NibbleColumnOrder::kOrder);
    const DigitPair rests = row.rests(k, NibbleColumnOrder::kOrder);
    _mm512_storeu_si512(high, digits.high);
    _mm512_storeu_si512(low, digits.low);
    _mm512_storeu_si512(rest_high, rests.high);
    _mm512_storeu_si512(rest_low, rests.low);
    for (int64_t i = 0; i < kCodeColumns; ++i) {
      const int64_t at = i % 2 * 32 + i / 2;  // even columns first
      const double whole = 256.0 * high[at] + low[at];
      const double rest = (256.0 * rest_high[at] + rest_low[at]) * static_cast<double>(kRestUnit);
      const double exact = k + i < columns ? static_cast<double>(x.data()[k + i]) : 0.0;
      const double number = exact / static_cast<double>(row.unit());
      // Three roundings of floats, of numbers of 15 bits.
      const double rounding = 1.0 / 128.0;
      report(__builtin_fabs(whole - number) <= 0.5 + rounding, "digits");
      report(__builtin_fabs(whole + rest - number) <= rounding, "digits of what was rounded away");
    }
  }
}

constexpr int64_t kRows = 44;  // the last tile has 12
constexpr float kE2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

struct MxfpScale {
  using Type = uint8_t;
  static Type draw(Random& random) { return static_cast<Type>(120 + random.bits() % 8); }
  static double value(Type scale, float) {
    return static_cast<double>(V::from_bits(uint32_t{scale} << 23));
  }
};
struct NvfpScale {
  using Type = uint8_t;
  static Type draw(Random& random) { return static_cast<Type>(random.bits() % 0x7f); }
  static double value(Type scale, float global) {
    return static_cast<double>(V::e4m3_to_float(scale) * global);
  }
};
struct Int4Scale {
  using Type = moe::Bf16;
  static Type draw(Random& random) { return V::to_bf16(0.01f + random.uniform()); }
  static double value(Type scale, float) { return static_cast<double>(V::to_float(scale)); }
};

struct Int8Scale {
  using Type = float;
  static Type draw(Random& random) { return 0.01f + random.uniform(); }
  static double value(Type scale, float) { return static_cast<double>(scale); }
};

enum class Values { kInt4, kInt4WithZeros, kE2m1, kInt8 };

// A matrix of two experts, of which the second is multiplied, of a format F.
template <class F, class Scale, Values kValues>
struct Weights {
  using Type = typename Scale::Type;
  static constexpr int64_t kExperts = 2;
  static constexpr int64_t kGroup = int64_t{1} << F::kShift;

  explicit Weights(int64_t columns_, Random& random)
      : columns(columns_),
        groups(kValues == Values::kInt8 ? 1 : columns >> F::kShift),
        codes(kExperts * kRows * columns * F::kBits / 8),
        scales(kExperts * kRows * groups),
        zeros(kExperts * kRows / 2 * groups) {
    for (int64_t i = 0; i < kExperts * kRows * columns * F::kBits / 8; ++i) {
      codes.data()[i] = static_cast<uint8_t>(random.bits());
    }
    for (int64_t i = 0; i < kExperts * kRows * groups; ++i) scales.data()[i] = Scale::draw(random);
    for (int64_t i = 0; i < kExperts * kRows / 2 * groups; ++i) {
      zeros.data()[i] = static_cast<uint8_t>(random.bits());
    }
    matrix.weight = reinterpret_cast<const std::byte*>(codes.data());
    matrix.row_bytes = columns * F::kBits / 8;
    matrix.expert_bytes = kRows * matrix.row_bytes;
    matrix.rows = kRows;
    matrix.part_rows = kRows;
    matrix.scale = reinterpret_cast<const std::byte*>(scales.data());
    matrix.scale_row_bytes = groups * static_cast<int64_t>(sizeof(Type));
    matrix.scale_expert_bytes = kRows * matrix.scale_row_bytes;
    matrix.scale_block_rows = 1;
    matrix.scale_part_rows = kRows;
    matrix.scale_shift = kValues == Values::kInt8 ? 63 : F::kShift;
    if (kValues == Values::kInt4WithZeros) {
      matrix.zero = reinterpret_cast<const std::byte*>(zeros.data());
    }
    matrix.global = globals;
  }

  void set_to_nothing(int64_t row, int64_t k) {
    uint8_t& byte = codes.data()[((kRows + row) * columns + k) * F::kBits / 8];
    const int zero = kValues == Values::kE2m1 ? 0 : zero_point(row, k);
    byte = static_cast<uint8_t>(kValues == Values::kInt8 ? 0
                                : k % 2 == 0             ? (byte & 0xf0) | zero
                                                         : (byte & 0xf) | zero << 4);
  }
  double at(int64_t row, int64_t k) const {
    const uint8_t byte = codes.data()[((kRows + row) * columns + k) * F::kBits / 8];
    const int code = byte >> (k % 2 * 4) & 0xf;
    const int64_t group = kValues == Values::kInt8 ? 0 : k / kGroup;
    const double scale = Scale::value(scales.data()[(kRows + row) * groups + group], globals[1]);
    if (kValues == Values::kInt8) return static_cast<int8_t>(byte) * scale;
    if (kValues == Values::kE2m1) {
      return static_cast<double>(kE2m1[code % 8]) * (code < 8 ? scale : -scale);
    }
    return (code - zero_point(row, k)) * scale;
  }

  int64_t columns;
  int64_t groups;
  Memory<uint8_t> codes;
  Memory<Type> scales;
  Memory<uint8_t> zeros;
  const float globals[kExperts] = {7.0f, 0.3f};
  moe::Matrix matrix{};

 private:
  int zero_point(int64_t row, int64_t k) const {
    if (kValues != Values::kInt4WithZeros) return 8;
    return zeros.data()[(kRows / 2 + row / 2) * groups + k / kGroup] >> (row % 2 * 4) & 0xf;
  }
};

constexpr int64_t kMostColumns = 2304;
alignas(64) std::byte
    packed[kFewBlocks * (kMostColumns * moe::kPackedColumnBytes + moe::kPackedHeaderBytes)];
FewBuffer buffer;

// Products of `count` tokens, x[token][column], with all rows: out[token][row]. In turns, tiles are
// of every other row.
template <class F>
void multiply(const moe::Matrix& matrix, int64_t k_begin, int64_t columns, bool in_turns,
              const float (*x)[kMostColumns], int64_t count, float (*out)[kRows]) {
  const moe::Group group{1, 0, count, 0};
  for (int64_t i = 0; i * kBlockTokens<F> < count; ++i) {
    pack_few<F>(group, i, columns, packed, [&](int64_t pair) { return x[pair]; });
  }
  const FewTokens<F> tokens(packed, group, columns);
  const auto pair_at = [&](int64_t i) -> TilePair {
    if (in_turns) {
      const int64_t rows = min_of(kTile, kRows / 2 - kTile * i);
      return {2 * kTile * i, rows, 2 * kTile * i + 1, rows};
    }
    const int64_t left = kRows - 2 * kTile * i;
    return {2 * kTile * i, min_of(kTile, left), 2 * kTile * i + kTile,
            left > kTile ? min_of(kTile, left - kTile) : 0};
  };
  const Rows<F, decltype(pair_at)> rows{.matrix = matrix,
                                        .expert = 1,
                                        .step = in_turns ? 2 : 1,
                                        .k_begin = k_begin,
                                        .columns = columns,
                                        .pairs = 2,
                                        .pair_at = pair_at,
                                        .following = {1, pair_at(0)}};
  [[maybe_unused]] const TileScope scope(tokens.columns);
  for (int64_t i = 0; i < rows.pairs; ++i) {
    multiply_few(rows, i, tokens, buffer);
    const TilePair pair = pair_at(i);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t r = 0; r < pair.first_rows; ++r) {
        out[t][pair.first + r * rows.step] = buffer.products[0][t][r];
      }
      for (int64_t r = 0; r < pair.second_rows; ++r) {
        out[t][pair.second + r * rows.step] = buffer.products[1][t][r];
      }
    }
  }
}

// Rows of so many columns, from the first one and from a later one on.
template <class F, class Scale, Values kValues>
void test_columns(int64_t columns, Random& random) {
  constexpr int64_t kMost = kMostFewTokens<F>;
  static float x[kMost][kMostColumns];
  static float out[kMost][kRows];
  static float others[kMost][kRows];
  for (const int64_t k_begin : {int64_t{0}, int64_t{1} << F::kShift}) {
    Weights<F, Scale, kValues> weights(k_begin + columns, random);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t k = 0; k < columns; k += 8) weights.set_to_nothing(r, k_begin + k);
    }
    const auto kind = [](int64_t t) { return static_cast<Kind>(t % 5 < 4 ? t % 4 : 0); };
    for (int64_t t = 0; t < kMost; ++t) fill(kind(t), columns, x[t], random);
    multiply<F>(weights.matrix, k_begin, columns, false, x, kMost, out);
    for (int64_t t = 0; t < kMost; ++t) {
      double apart = 0, norm = 0;
      for (int64_t r = 0; r < kRows; ++r) {
        double exact = 0;
        for (int64_t k = 0; k < columns; ++k) {
          exact += weights.at(r, k_begin + k) * static_cast<double>(x[t][k]);
        }
        const double off = static_cast<double>(out[t][r]) - exact;
        apart += off * off;
        norm += exact * exact;
      }
      report(apart <= 2e-4 * 2e-4 * norm, "products of few tokens");
    }
    // A token's sums are the same bits in any company, in whatever tile the row is.
    for (const int64_t count : {int64_t{1}, int64_t{2}, kMost - 1}) {
      for (int64_t t = 0; t + count <= kMost; ++t) {
        multiply<F>(weights.matrix, k_begin, columns, t % 2 == 0, x + t, count, others);
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t r = 0; r < kRows; ++r) {
            report(others[i][r] == out[t + i][r], "a token's sums by themselves");
          }
        }
      }
    }
  }
}

template <class F, class Scale, Values kValues>
void test_format(Random& random) {
  constexpr int64_t kGroup = int64_t{1} << F::kShift;
  for (const int64_t groups :
       {int64_t{1}, int64_t{3}, int64_t{5}, 1024 / kGroup, 1024 / kGroup + 1, 2176 / kGroup}) {
    test_columns<F, Scale, kValues>(groups * kGroup, random);
  }
}

}  // namespace

namespace moe_tests {

void test_digits() {
  Random random;
  for (const int64_t columns : {16, 64, 96, 130, 200}) {
    for (int kind = 0; kind < static_cast<int>(Kind::kKinds); ++kind) {
      test_digits_of(static_cast<Kind>(kind), columns, random);
    }
  }
  test_format<Int4Codes<5, false>, Int4Scale, Values::kInt4>(random);
  test_format<Int4Codes<6, false>, Int4Scale, Values::kInt4>(random);
  test_format<Int4Codes<7, false>, Int4Scale, Values::kInt4>(random);
  test_format<Int4Codes<5, true>, Int4Scale, Values::kInt4WithZeros>(random);
  test_format<Int4Codes<6, true>, Int4Scale, Values::kInt4WithZeros>(random);
  test_format<Int4Codes<7, true>, Int4Scale, Values::kInt4WithZeros>(random);
  test_format<Mxfp4Codes, MxfpScale, Values::kE2m1>(random);
  test_format<Nvfp4Codes, NvfpScale, Values::kE2m1>(random);
  for (const int64_t columns : {1, 30, 65, 100, 191, 1100, 2176}) {
    test_columns<Int8Codes, Int8Scale, Values::kInt8>(columns, random);
  }
}

}  // namespace moe_tests
