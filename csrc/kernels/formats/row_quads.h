// Weights that are small whole numbers by activations of 16 bits, in two digits of 8 (AVX512-VNNI,
// VBMI), eight rows at a time: a vector has 16 bytes of each of four rows, so that sums of 32
// columns of four rows are converted and scaled by the instructions that one row's take. Codes are
// made positive, as the instruction wants them; what that adds to a sum is known from the
// activations and is where the sum begins. All that is multiplied and added before a scale is
// exact.
//
// F has a format: rows; pair(), which makes two vectors of four rows' lines, of 64 bytes each;
// code(), the codes of one; the column of each digit (kOrder), in the order in which the codes
// come; scales(), and zeros() where there are zero points.
#pragma once

#include "kernels/fetch.h"
#include "kernels/formats/math.h"

namespace {

constexpr int64_t kQuadColumns = 128;

struct alignas(64) DigitOrder {
  uint8_t column[kQuadColumns];
};

// 128 activations, in the place of as many floats: whole numbers of 15 bits of the largest (see
// kMost).
struct DigitBlock {
  int8_t high[kQuadColumns];
  int8_t low[kQuadColumns];
  int8_t rest[kQuadColumns];  // what was rounded away, by 256; stale where has_rest is not set
  // What takes back that codes are positive, of each part and lane; with kHighFits, where there is
  // one part, of the low digits and of the high ones.
  int32_t start[2][4];
  int32_t rest_start[2][4];
  float scale[2][4];
  int32_t has_rest;
  int32_t row_has_rest;  // of a row's first block: whether any of it has
};
static_assert(sizeof(DigitBlock) <= kQuadColumns * sizeof(float));

template <class F>
struct RowQuads : F {
  using Operand = float;
  using Row = typename F::Row;
  static constexpr int64_t kStep = kQuadColumns;
  static constexpr int kRows = 8;
  // Tasks are of whole passes.
  static constexpr int64_t kTaskRows = kRows;

  // Rows are floats in their order until they are finished.
  static void arrange(float*) {}
  static int64_t position(int64_t k) { return k; }

  static void finish_row(float* row, int64_t columns) {
    int32_t any = 0;
    for (int64_t k = 0; k < columns; k += kStep) any |= to_digits(row + k);
    reinterpret_cast<DigitBlock*>(row)->row_has_rest = any;
  }

  // As the shared body's Product, of rows that are finished.
  struct Product {
    const moe::Matrix& matrix;
    int64_t expert;
    int64_t k_begin;
    int64_t k_count;
    const float* const* x;
    int64_t tokens;

    void operator()(int64_t first, int64_t step, int64_t rows, int64_t jump, float* out) const {
      F::choose(matrix, [&]<class Case>() { multiply<Case>(first, step, rows, jump, out); });
    }

   private:
    template <class Case>
    void multiply(int64_t first, int64_t step, int64_t rows, int64_t jump, float* out) const {
      const PassesAhead ahead(kRows, step * matrix.row_bytes, bytes_of(k_count), rows, jump);
      for (int64_t r = 0; r < rows; r += kRows) {
        // Rows that are not there are the last one once more.
        const int64_t there = rows - r < kRows ? rows - r : kRows;
        Row pass_rows[kRows];
        for (int64_t i = 0; i < kRows; ++i) {
          const int64_t at = r + (i < there ? i : there - 1);
          pass_rows[i] = F::row(matrix, expert, first + at * step, k_begin);
        }
        over_tokens<Case>(pass_rows, ahead.from(r), static_cast<__mmask8>((1u << there) - 1),
                          out + r);
      }
    }

    template <class Case>
    void over_tokens(const Row (&of)[kRows], const PassAhead& ahead, __mmask8 there,
                     float* out) const {
      const auto* const* blocks = reinterpret_cast<const DigitBlock* const*>(x);
      int64_t t = 0;
      const auto next = [&]<int kTokens>() {
        __m256 sums[kTokens];
        dot<Case, kTokens>(of, blocks + t, k_count, ahead, sums);
        for (int i = 0; i < kTokens; ++i, ++t) {
          if (blocks[t]->row_has_rest != 0) {
            sums[i] = _mm256_add_ps(sums[i], rest<Case>(of, ahead, blocks[t]));
          }
          _mm256_mask_storeu_ps(out + t * moe::kRowBlock, there, sums[i]);
        }
      };
      while (t + 4 <= tokens) next.template operator()<4>();
      switch (tokens - t) {
        case 3:
          return next.template operator()<3>();
        case 2:
          return next.template operator()<2>();
        case 1:
          return next.template operator()<1>();
      }
    }

    template <class Case>
    __m256 rest(const Row (&of)[kRows], const PassAhead& ahead, const DigitBlock* blocks) const {
      __m256 sums[1];
      dot<Case, 1, true>(of, &blocks, k_count, ahead, sums);
      return _mm256_mul_ps(sums[0], _mm256_set1_ps(1.0f / 256.0f));
    }
  };

 private:
  // Those that so many columns of a row take.
  static int64_t bytes_of(int64_t columns) {
    constexpr int64_t kColumnsOfByte = kStep / F::kBlockBytes;
    return (columns + kColumnsOfByte - 1) / kColumnsOfByte;
  }

  static constexpr int kLines = static_cast<int>(F::kBlockBytes / 64);
  // Vectors of one part: columns that share scales.
  static constexpr int kPartVectors = 4 * kLines / F::kParts;
  // Whether a lane's sum of codes, as they are meant, by high digits is a number of 16 bits: one
  // instruction then adds its 256-fold to the sum of the low ones. MXFP4's digits are smaller for
  // that, of 14.4 bits; INT8's would be far too small, and NVFP4's blocks have no room for what
  // both sums begin with.
  static constexpr int kLaneColumns = kQuadColumns / F::kParts / 4;
  static constexpr int kMostFitting = 32767 / (kLaneColumns * F::kZero);
  static constexpr bool kHighFits = F::kParts == 1 && kMostFitting >= 64;
  // Digits are of 8 bits.
  static constexpr int kMostHigh = kHighFits && kMostFitting < 127 ? kMostFitting : 127;
  static constexpr float kMost = kMostHigh * 256.0f;

  // All rows by kTokens rows of operands, or by one's rests: each sum in the same order whatever
  // the number of tokens. What follows of the weights is fetched meanwhile.
  template <class Case, int kTokens, bool kRest = false>
  static void dot(const Row (&rows)[kRows], const DigitBlock* const* x, int64_t columns,
                  const PassAhead& ahead, __m256 (&out)[kTokens]) {
    V::F sum[kTokens][2];
    for (auto& of_token : sum) of_token[0] = of_token[1] = V::zero();
    const DigitBlock* blocks[kTokens];
    for (int t = 0; t < kTokens; ++t) blocks[t] = x[t];
    const auto next = [&] {
      for (int t = 0; t < kTokens; ++t) {
        blocks[t] =
            reinterpret_cast<const DigitBlock*>(reinterpret_cast<const float*>(blocks[t]) + kStep);
      }
    };
    int64_t k = 0;
    for (; k + kStep <= columns; k += kStep) {
#pragma GCC unroll 2
      for (int line = 0; line < kLines; ++line) {
        const int64_t near = ahead.near_of(bytes_of(k) + 64 * line);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          fetch_ahead(F::address(rows[r], k) + 64 * line, ahead.far, near);
        }
      }
      add_block<Case, kTokens, true, kRest>(rows, blocks, k, kStep, sum);
      next();
    }
    if (k < columns) add_block<Case, kTokens, false, kRest>(rows, blocks, k, columns - k, sum);
    for (int t = 0; t < kTokens; ++t) out[t] = row_sums(sum[t]);
  }

  // The sums of each row's four lanes.
  static __m256 row_sums(const V::F (&lanes)[2]) {
    const V::F pairs = V::add(_mm512_shuffle_ps(lanes[0], lanes[1], 0x88),
                              _mm512_shuffle_ps(lanes[0], lanes[1], 0xdd));
    const V::F all = V::add(pairs, _mm512_permute_ps(pairs, 0xb1));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(first, all));
  }

  template <class Case, int kTokens, bool kWhole, bool kRest>
  [[gnu::always_inline]] static void add_block(const Row (&rows)[kRows],
                                               const DigitBlock* const (&x)[kTokens], int64_t k,
                                               int64_t left, V::F (&sum)[kTokens][2]) {
    if constexpr (kRest) {
      if (x[0]->has_rest == 0) return;
    }
    const int64_t count = kWhole ? kStep : left;
    V::F scales[2][F::kParts];
    Case::scales(rows, k, count, scales[0]);
    Case::scales(rows + 4, k, count, scales[1]);
    __m512i high[kTokens][2];
    __m512i low[kTokens][2];
    const auto start = [&](int t, int part) {
      const int32_t* from = kRest ? x[t]->rest_start[part] : x[t]->start[part];
      return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    };
    const auto high_start = [&](int t) {
      if constexpr (kHighFits && !kRest) return start(t, 1);
      return _mm512_setzero_si512();
    };
    const auto whole = [](__m512i of_high, __m512i of_low) {
      if constexpr (kRest) return of_low;
      return add_high(of_high, of_low);
    };
#pragma GCC unroll 4
    for (int pair = 0; pair < 2 * kLines; ++pair) {
      __m512i vectors[2][2];
#pragma GCC unroll 2
      for (int q = 0; q < 2; ++q) {
        __m512i lines[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) lines[r] = load<kWhole>(rows[4 * q + r], k, count, pair / 2);
        F::pair(lines, pair % 2, vectors[q]);
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int vector = 2 * pair + v;
        const int part = vector / kPartVectors;
        if (vector % kPartVectors == 0) {
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            high[t][0] = high[t][1] = high_start(t);
            low[t][0] = low[t][1] = start(t, part);
          }
        }
#pragma GCC unroll 2
        for (int i = 0; i < F::kCodes; ++i) {
          const __m512i codes[2] = {F::code(vectors[0][v], i), F::code(vectors[1][v], i)};
          const int at = (vector * F::kCodes + i) * 16;
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            if constexpr (!kRest) add(codes, digits(x[t]->high + at), high[t]);
            add(codes, digits((kRest ? x[t]->rest : x[t]->low) + at), low[t]);
          }
        }
        if ((vector + 1) % kPartVectors == 0) {
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            const V::F scale = _mm512_broadcast_f32x4(_mm_loadu_ps(x[t]->scale[part]));
#pragma GCC unroll 2
            for (int q = 0; q < 2; ++q) {
              V::F value = _mm512_cvtepi32_ps(whole(high[t][q], low[t][q]));
              if constexpr (Case::kHasZeros) {
                value = V::fma(_mm512_cvtepi32_ps(whole(high_start(t), start(t, part))),
                               Case::zeros(rows + 4 * q, k, count), value);
              }
              sum[t][q] = V::fma(value, V::mul(scales[q][part], scale), sum[t][q]);
            }
          }
        }
      }
    }
  }

  // Of sums of digits, or of what these begin with.
  [[gnu::always_inline]] static __m512i add_high(__m512i high, __m512i low) {
    if constexpr (kHighFits) return _mm512_dpwssd_epi32(low, high, _mm512_set1_epi32(256));
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }

  [[gnu::always_inline]] static void add(const __m512i (&codes)[2], __m512i digits,
                                         __m512i (&to)[2]) {
    to[0] = _mm512_dpbusd_epi32(to[0], codes[0], digits);
    to[1] = _mm512_dpbusd_epi32(to[1], codes[1], digits);
  }

  [[gnu::always_inline]] static __m512i digits(const int8_t* from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  // A line of a row's block, of which `count` columns are there; zeros after them.
  template <bool kWhole>
  [[gnu::always_inline]] static __m512i load(const Row& row, int64_t k, int64_t count, int line) {
    const std::byte* from = F::address(row, k) + 64 * line;
    if constexpr (kWhole) return _mm512_loadu_si512(from);
    const int64_t bytes = bytes_of(count) - 64 * line;
    if (bytes >= 64) return _mm512_loadu_si512(from);
    const uint64_t there = bytes > 0 ? (uint64_t{1} << bytes) - 1 : 0;
    return _mm512_maskz_loadu_epi8(there, from);
  }

  // Floats to a block where they lie; returns whether it has rests.
  static int32_t to_digits(float* x) {
    constexpr int kVectors = 8;
    V::F scaled[kVectors];
    // As whole numbers, so that NaN is the largest.
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < kVectors; ++i) {
      scaled[i] = V::load(x + i * V::kWidth);
      most = _mm512_max_epi32(most, _mm512_castps_si512(V::abs(scaled[i])));
    }
    const int32_t bits = _mm512_reduce_max_epi32(most);
    const bool is_infinite = bits == 0x7f800000;
    // Smaller ones count as zeros: by a scale as small, products would be subnormal numbers, which
    // take a hundred times as long.
    constexpr int32_t kLeast = 0x0da24260;  // 1e-30
    const bool is_zero = bits < kLeast;
    const float largest = is_zero ? 1.0f : V::from_bits(static_cast<uint32_t>(bits));
    for (V::F& v : scaled) {
      // Beside infinity the others are nothing; by the factor, which is 0 then, it would be NaN.
      v = is_infinite ? signs_of_infinities(v) : V::mul(v, V::set(kMost / largest));
      if (is_zero) v = V::zero();
    }

    auto& block = *reinterpret_cast<DigitBlock*>(x);
    __m512i high[kVectors];
    __m512i low[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const __m512i whole = _mm512_cvtps_epi32(scaled[i]);
      low[i] = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
      high[i] = _mm512_srai_epi32(_mm512_sub_epi32(whole, low[i]), 8);
    }
    __m512i sums[2];
    const int without_high = order(high, block.high, sums);
    __m512i low_sums[2];
    order(low, block.low, low_sums);
    if constexpr (kHighFits) {
      set_start(low_sums, block.start);
      set_start(sums, block.start + 1);
    } else {
      for (int i = 0; i < 2; ++i) sums[i] = add_high(sums[i], low_sums[i]);
      set_start(sums, block.start);
    }
    set_scale(largest * (F::kUnit / kMost), block);
    block.has_rest = !is_infinite && needs_rest(scaled, without_high);
    if (block.has_rest != 0) {
      for (int i = 0; i < kVectors; ++i) {
        const V::F rest = V::sub(scaled[i], _mm512_cvtepi32_ps(_mm512_cvtps_epi32(scaled[i])));
        // A half is 128, which is packed as 127.
        high[i] = _mm512_cvtps_epi32(V::mul(rest, V::set(256.0f)));
      }
      order(high, block.rest, sums);
      set_start(sums, block.rest_start);
    }
    return block.has_rest;
  }

  // Digits as bytes in the order of the codes, and their sums in each half, by lanes of four;
  // returns how many are zero.
  static int order(const __m512i (&from)[8], int8_t (&to)[kQuadColumns], __m512i (&sums)[2]) {
    __m512i bytes[2];
    for (int i = 0; i < 2; ++i) {
      const __m512i* four = from + 4 * i;
      bytes[i] = _mm512_packs_epi16(_mm512_packs_epi32(four[0], four[1]),
                                    _mm512_packs_epi32(four[2], four[3]));
    }
    int zeros = 0;
    for (int i = 0; i < 2; ++i) {
      const __m512i digits = _mm512_permutex2var_epi8(
          bytes[0], _mm512_load_si512(kPackedOrder.column + 64 * i), bytes[1]);
      _mm512_storeu_si512(to + 64 * i, digits);
      sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), digits);
      zeros += __builtin_popcountll(_mm512_testn_epi8_mask(digits, digits));
    }
    return zeros;
  }

  // Where the columns of F::kOrder are once numbers of 32 bits are packed to bytes, lane by lane.
  static constexpr DigitOrder kPackedOrder = [] {
    DigitOrder order{};
    for (int at = 0; at < kQuadColumns; ++at) {
      const int column = F::kOrder.column[at];
      const int half = column / 64, vector = column / 16 % 4, lane = column / 4 % 4;
      order.column[at] = static_cast<uint8_t>(64 * half + 16 * lane + 4 * vector + column % 4);
    }
    return order;
  }();

  // Of kParts.
  static void set_start(const __m512i (&sums)[2], int32_t (*start)[4]) {
    const auto lanes = [](__m512i v) {
      const __m256i half =
          _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
      const __m128i all =
          _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      return _mm_mullo_epi32(all, _mm_set1_epi32(-F::kZero));
    };
    for (int part = 0; part < F::kParts; ++part) {
      const __m128i values =
          lanes(F::kParts == 1 ? _mm512_add_epi32(sums[0], sums[1]) : sums[part]);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(start[part]), values);
    }
  }

  // Infinity is the scale of those alone that have it: by it, zeros would be NaN.
  static void set_scale(float scale, DigitBlock& block) {
    const bool is_infinite = V::to_bits(scale) == 0x7f800000;
    for (int i = 0; i < 8; ++i) block.scale[i / 4][i % 4] = is_infinite ? 0.0f : scale;
    for (int64_t at = 0; is_infinite && at < kQuadColumns; ++at) {
      if (block.low[at] != 0) block.scale[F::kParts * at / kQuadColumns][at / 4 % 4] = scale;
    }
  }

  // Whether most of them, zeros aside, have less than 7 bits of the 15: those without a high digit,
  // which zeros lack too. What is lost of a few is lost among the others.
  static bool needs_rest(const V::F (&scaled)[8], int without_high) {
    if (2 * without_high <= kQuadColumns) return false;
    int zeros = 0;
    for (const V::F& v : scaled) {
      zeros += __builtin_popcount(_mm512_cmp_ps_mask(v, V::zero(), _CMP_EQ_OQ));
    }
    return 2 * (without_high - zeros) > kQuadColumns - zeros;
  }

  // 1 and -1 for infinities, 0 for the others.
  static V::F signs_of_infinities(V::F v) {
    const V::F ones = _mm512_or_ps(_mm512_and_ps(v, V::set(-0.0f)), V::set(1.0f));
    const __mmask16 infinite = _mm512_cmp_ps_mask(V::abs(v), V::set(3.4028235e38f), _CMP_GT_OQ);
    return _mm512_maskz_mov_ps(infinite, ones);
  }
};

}  // namespace
