// fp8_fp16.h where no CPU has its instructions: over emulations of those it uses, lane by lane.
// Against doubles, and that a token's sums do not depend on how many tokens and rows come with it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "support.h"

namespace {

template <class To, class From>
To cast(const From& from) {
  static_assert(sizeof(To) <= sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct __m128i {
  uint16_t lane[8];
};
struct __m128h {
  _Float16 lane[8];
};
struct __m256 {
  float lane[8];
};
struct __m256i {
  uint16_t lane[16];
};
struct __m256h {
  _Float16 lane[16];
};
struct __m512 {
  float lane[16];
};
struct __m512i {
  uint16_t lane[32];
};
struct __m512h {
  _Float16 lane[32];
};
struct Words {
  int32_t lane[16];
};
using __mmask8 = uint8_t;
using __mmask16 = uint16_t;

template <class Vector, class Each>
Vector each(Vector v, const Each& change) {
  size_t i = 0;
  for (auto& lane : v.lane) lane = static_cast<std::decay_t<decltype(lane)>>(change(lane, i++));
  return v;
}

__m128i _mm_set1_epi16(int16_t value) {
  return each(__m128i{}, [&](auto, size_t) { return value; });
}
void _mm_storeu_si128(__m128i* to, __m128i v) { std::memcpy(to, &v, sizeof v); }
__m128i _mm_castph_si128(__m128h v) { return cast<__m128i>(v); }
__m128h _mm256_cvtxps_ph(__m256 v) {
  return each(__m128h{}, [&](auto, size_t i) { return v.lane[i]; });
}
__m256 _mm256_set1_ps(float value) {
  return each(__m256{}, [&](auto, size_t) { return value; });
}
__m256 _mm256_div_ps(__m256 a, __m256 b) {
  return each(a, [&](float lane, size_t i) { return lane / b.lane[i]; });
}
__m256 _mm256_maskz_loadu_ps(__mmask8 mask, const float* from) {
  return each(__m256{}, [&](float, size_t i) { return mask >> i & 1 ? from[i] : 0.0f; });
}
__m256h _mm256_castsi256_ph(__m256i v) { return cast<__m256h>(v); }
__m256h _mm256_add_ph(__m256h a, __m256h b) {
  return each(a, [&](_Float16 lane, size_t i) { return lane + b.lane[i]; });
}
void _mm256_storeu_ph(void* to, __m256h v) { std::memcpy(to, &v, sizeof v); }

__m512i _mm512_loadu_si512(const void* from) {
  __m512i v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
__m512i _mm512_maskz_loadu_epi8(uint64_t mask, const void* from) {
  uint8_t bytes[64] = {};
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) bytes[i] = static_cast<const uint8_t*>(from)[i];
  }
  return _mm512_loadu_si512(bytes);
}
__m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const float* from) {
  float values[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) values[i] = from[i];
  }
  return _mm512_loadu_si512(values);
}
__m512i _mm512_slli_epi16(__m512i v, int count) {
  return each(v, [&](uint16_t lane, size_t) { return lane << count; });
}
__m512i _mm512_srai_epi16(__m512i v, int count) {
  return each(v, [&](uint16_t lane, size_t) { return static_cast<int16_t>(lane) >> count; });
}
__m512i _mm512_and_si512(__m512i a, __m512i b) {
  return each(a, [&](uint16_t lane, size_t i) { return lane & b.lane[i]; });
}
__m512i _mm512_set1_epi16(int16_t value) {
  return each(__m512i{}, [&](auto, size_t) { return value; });
}
__m512i _mm512_set1_epi32(int32_t value) {
  return cast<__m512i>(each(Words{}, [&](auto, size_t) { return value; }));
}
__m512i _mm512_setzero_si512() { return {}; }
__mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  int mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (cast<Words>(a).lane[i] < cast<Words>(b).lane[i]) << i;
  return static_cast<__mmask16>(mask);
}
__m512i _mm512_mask_max_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b) {
  return cast<__m512i>(each(cast<Words>(other), [&](int32_t lane, size_t i) {
    return mask >> i & 1 ? std::max(cast<Words>(a).lane[i], cast<Words>(b).lane[i]) : lane;
  }));
}
int32_t _mm512_reduce_max_epi32(__m512i v) {
  const Words words = cast<Words>(v);
  return *std::max_element(words.lane, words.lane + 16);
}
__m256i _mm512_castsi512_si256(__m512i v) { return cast<__m256i>(v); }
__m256i _mm512_extracti64x4_epi64(__m512i v, int half) {
  return each(__m256i{},
              [&](auto, size_t i) { return v.lane[i + 16 * static_cast<size_t>(half)]; });
}
__m512h _mm512_castsi512_ph(__m512i v) { return cast<__m512h>(v); }
__m512i _mm512_castph_si512(__m512h v) { return cast<__m512i>(v); }
__m512h _mm512_setzero_ph() { return {}; }
__m512h _mm512_loadu_ph(const void* from) { return cast<__m512h>(_mm512_loadu_si512(from)); }
__m512 _mm512_cvtxph_ps(__m256h v) {
  return each(__m512{}, [&](auto, size_t i) { return v.lane[i]; });
}
__m256h _mm512_cvtxps_ph(__m512 v) {
  return each(__m256h{}, [&](auto, size_t i) { return v.lane[i]; });
}
// A double holds the exact product, and its sum with an fp16 of any size that is here.
__m512h _mm512_fmadd_ph(__m512h a, __m512h b, __m512h c) {
  return each(c, [&](double lane, size_t i) {
    return static_cast<double>(a.lane[i]) * static_cast<double>(b.lane[i]) + lane;
  });
}
__m512h _mm512_mul_ph(__m512h a, __m512h b) { return _mm512_fmadd_ph(a, b, {}); }

struct V {
  using F = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 4;
  static constexpr int kStreamRows = 4;
  static constexpr float kE4m3Scale = 256.0f;
  struct Pair {
    F a, b;
  };
  static F zero() { return {}; }
  static F set(float value) {
    return each(F{}, [&](auto, size_t) { return value; });
  }
  static F load(const float* from) { return cast<F>(_mm512_loadu_si512(from)); }
  static void store(float* to, F v) { std::memcpy(to, &v, sizeof v); }
  static F add(F a, F b) {
    return each(a, [&](float lane, size_t i) { return lane + b.lane[i]; });
  }
  static F mul(F a, F b) {
    return each(a, [&](float lane, size_t i) { return lane * b.lane[i]; });
  }
  static F fma(F a, F b, F c) { return add(mul(a, b), c); }
  template <size_t kRows>
  static void sums(const F (&rows)[kRows], float* to) {
    for (const F& row : rows) {
      *to = 0;
      for (const float lane : row.lane) *to += lane;
      ++to;
    }
  }
  static Pair deinterleave(Pair natural) {
    const auto* from = reinterpret_cast<const float*>(&natural);
    return {each(F{}, [&](auto, size_t i) { return from[2 * i]; }),
            each(F{}, [&](auto, size_t i) { return from[2 * i + 1]; })};
  }
  static uint32_t to_bits(float value) { return cast<uint32_t>(value); }
  static float from_bits(uint32_t bits) { return cast<float>(bits); }
  // Of other formats.
  static Pair load_e4m3(const uint8_t*) { return {}; }
  static Pair load_int8(const int8_t*) { return {}; }
};

}  // namespace

#include "kernels/formats/fp8_fp16.h"

namespace {

using moe_tests::expect;
using moe_tests::Guarded;

constexpr double kAllowed = 5e-3;

double value_of(uint8_t code) {
  const auto bits = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
  return 256 * static_cast<double>(cast<_Float16>(bits));
}

// A matrix of one expert in the memory that it needs, with scales for blocks of 128 x 128 of each
// part, for rows, or one.
struct Weights {
  enum Kind { kBlocks, kRows, kOne };

  Weights(Kind kind_, int64_t part_rows, int64_t parts, int64_t columns_, std::mt19937& random)
      : kind(kind_),
        rows(parts * part_rows),
        columns(columns_),
        row_blocks((part_rows + 127) / 128),
        column_blocks((columns + 127) / 128),
        codes(static_cast<size_t>(rows * columns)),
        scales(static_cast<size_t>(count(parts)) * sizeof(float)) {
    for (int64_t i = 0; i < rows * columns; ++i) {
      const auto code = static_cast<uint8_t>(random());
      codes.data()[i] = std::byte{(code & 0x7f) == 0x7f ? uint8_t{3} : code};
    }
    for (int64_t i = 0; i < count(parts); ++i) {
      const float size = std::exp2(static_cast<float>(random() % 2000) / 100 - 10);
      scale()[i] = random() % 8 == 0 ? -size : size;
    }
    matrix.weight = codes.data();
    matrix.row_bytes = columns;
    matrix.rows = rows;
    matrix.part_rows = part_rows;
    matrix.scale = scales.data();
    matrix.scale_row_bytes =
        kind == kOne ? 0
                     : (kind == kRows ? 1 : column_blocks) * static_cast<int64_t>(sizeof(float));
    matrix.scale_block_rows = kind == kBlocks ? 128 : kind == kRows ? 1 : rows;
    matrix.scale_part_rows = kind == kBlocks ? row_blocks : kind == kRows ? part_rows : 0;
    matrix.scale_shift = kind == kBlocks ? 7 : 63;
  }

  int64_t count(int64_t parts) const {
    return kind == kBlocks ? parts * row_blocks * column_blocks : kind == kRows ? rows : 1;
  }
  float* scale() const { return reinterpret_cast<float*>(scales.data()); }
  double at(int64_t row, int64_t k) const {
    const int64_t part = row / matrix.part_rows;
    const int64_t block = part * row_blocks + (row - part * matrix.part_rows) / 128;
    const int64_t of = kind == kBlocks ? block * column_blocks + k / 128 : kind == kRows ? row : 0;
    return value_of(static_cast<uint8_t>(codes.data()[row * columns + k])) * scale()[of];
  }

  Kind kind;
  int64_t rows, columns, row_blocks, column_blocks;
  Guarded codes, scales;
  moe::Matrix matrix{};
};

// Rows of operands, in the format's order.
std::vector<std::vector<float>> arranged(const std::vector<std::vector<float>>& natural) {
  std::vector<std::vector<float>> rows;
  for (const auto& from : natural) {
    std::vector<float>& row = rows.emplace_back((from.size() + 127) / 128 * 128, 0.0f);
    std::copy(from.begin(), from.end(), row.begin());
    for (size_t k = 0; k < row.size(); k += 128) Fp8Fp16::arrange(row.data() + k);
    Fp8Fp16::finish_row(row.data(), static_cast<int64_t>(from.size()));
  }
  return rows;
}

void test_product(Weights::Kind kind, int64_t part_rows, int64_t parts, int64_t columns,
                  int64_t begin, int64_t step, std::mt19937& random) {
  const Weights weights(kind, part_rows, parts, columns, random);
  std::normal_distribution<float> normal;
  constexpr int64_t kTokens = 7;
  std::vector<std::vector<float>> x(kTokens, std::vector<float>(static_cast<size_t>(columns)));
  for (size_t t = 0; t < x.size(); ++t) {
    // As different as activations are: a thousand times more or less, also beside each other.
    for (float& v : x[t])
      v = normal(random) * (t == 2 ? 1e-6f : t == 5 ? std::exp(normal(random)) : 1);
  }
  x[3][static_cast<size_t>(columns / 2)] = 1e3f;
  const auto operands = arranged(x);
  const float* of[kTokens];
  for (size_t t = 0; t < kTokens; ++t) of[t] = operands[t].data();

  const int64_t whole = std::min<int64_t>(moe::kRowBlock, (part_rows - begin) / step);
  const int64_t first = (parts - 1) * part_rows + begin;
  float out[kTokens][moe::kRowBlock];
  const Fp8Fp16::Product all{weights.matrix, 0, 0, columns, of, kTokens};
  all(first, step, whole, 0, out[0]);
  for (int64_t t = 0; t < kTokens; ++t) {
    double apart = 0, norm = 0;
    for (int64_t r = 0; r < whole; ++r) {
      double exact = 0;
      for (int64_t k = 0; k < columns; ++k) {
        exact +=
            weights.at(first + r * step, k) * x[static_cast<size_t>(t)][static_cast<size_t>(k)];
      }
      apart += (out[t][r] - exact) * (out[t][r] - exact);
      norm += exact * exact;
    }
    expect(std::sqrt(apart) <= kAllowed * std::sqrt(norm) + 1e-30, "fp16 products");

    float alone[moe::kRowBlock];
    const Fp8Fp16::Product one{weights.matrix, 0, 0, columns, of + t, 1};
    for (int64_t r = 0; r < whole; r += moe::kRowAlign) {
      one(first + r * step, step, std::min(moe::kRowAlign, whole - r), 0, alone + r);
    }
    expect(std::equal(alone, alone + whole, out[t]), "a token by itself has the same sums");
  }
}

// Where all that fp16 rounds goes one way.
void test_constants(std::mt19937& random) {
  for (const uint8_t code : {0x38, 0x39, 0x3b, 0x3d, 0x3f, 0x7e}) {
    Weights weights(Weights::kBlocks, 4, 1, 4096, random);
    std::memset(weights.codes.data(), code, 4 * 4096);
    std::fill(weights.scale(), weights.scale() + 32, 1.0f / 1024);
    for (float value = 1; value < 2; value += 1.0f / 32) {
      const auto operands = arranged({std::vector<float>(4096, value)});
      const float* of[] = {operands[0].data()};
      float out[moe::kRowBlock];
      Fp8Fp16::Product{weights.matrix, 0, 0, 4096, of, 1}(0, 1, 4, 0, out);
      const double exact = value_of(code) * value * 4;
      expect(std::abs(out[0] - exact) <= kAllowed * exact, "fp16 products of constants");
    }
  }
}

}  // namespace

namespace moe_tests {

void test_fp16() {
  std::mt19937 random(1);
  for (const int64_t columns : {64, 128, 200, 768, 1024, 1032, 2048, 2120}) {
    for (const auto kind : {Weights::kBlocks, Weights::kRows, Weights::kOne}) {
      test_product(kind, 40, 2, columns, 4, 1, random);
      test_product(kind, 150, 1, columns, 104, 2, random);  // from one block of rows into the next
    }
  }
  test_constants(random);
}

}  // namespace moe_tests
