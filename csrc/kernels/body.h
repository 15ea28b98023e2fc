// The kernels, written once over the vector type V of an instruction set and the weights type W of
// a format. A translation unit includes its set's vec.h, the formats it instantiates, activation.h
// and this file.
//
// Everything is in an anonymous namespace, and nothing from the C++ library is called: an inline
// function with external linkage, compiled here under -mavx2, could be the copy that the linker
// keeps for callers which run on any CPU.
#pragma once

#include <type_traits>

#include "kernels/fetch.h"

namespace {

using moe::kRowBlock;
using moe::kTokenBlock;

constexpr int64_t kCacheLine = 64;

constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Adds to the sums the products of `left` columns from k on, at most a step.
template <class W, int kRows, int kTokens>
[[gnu::always_inline]] inline void multiply_step(const typename W::Row* rows,
                                                 const typename W::Operand* const* x, int64_t k,
                                                 int64_t left, V::F (&sum)[kRows][kTokens]) {
  if constexpr (requires { &W::template step<kRows, kTokens>; }) {
    W::template step<kRows, kTokens>(rows, x, k, left, sum);
  } else {
    typename W::Weights w[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      w[r] = left == W::kStep ? W::load(rows[r], k) : W::load_tail(rows[r], k, left);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const auto v = W::load_operand(x[t] + k);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][t] = W::multiply_add(w[r], v, sum[r][t]);
    }
  }
}

// Those of a row's columns, whole steps of them or nearly.
template <class W>
constexpr int64_t bytes_of(int64_t columns) {
  return columns * W::kStepBytes / W::kStep;
}

// Dot products of `kRows` weight rows with `kTokens` operand rows over [0, k_end).
// Every weight is loaded and converted once for all the tokens, every operand once for all the
// rows; several sums in flight hide the latency of the multiply-add. With kPrefetch, what follows
// of the weights is fetched meanwhile.
template <class W, int kRows, int kTokens, bool kPrefetch>
inline void dot(const typename W::Row* rows, const typename W::Operand* const* x, int64_t k_end,
                const PassAhead& ahead, float* out, int64_t out_stride) {
  constexpr int64_t kStep = W::kStep;
  constexpr int kSums = kRows * kTokens >= W::kChains ? 1 : W::kChains / (kRows * kTokens);
  // A pass of the loop reads whole cache lines of weights, so that it fetches each line once.
  constexpr int kLines = static_cast<int>((kCacheLine + W::kStepBytes - 1) / W::kStepBytes);
  constexpr int kUnroll = kSums > kLines ? kSums : kLines;
  V::F sum[kSums][kRows][kTokens];
  for (int u = 0; u < kSums; ++u)
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) sum[u][r][t] = V::zero();

  int64_t k = 0;
  for (; k + kUnroll * kStep <= k_end; k += kUnroll * kStep) {
    if constexpr (kPrefetch) {
#pragma GCC unroll 8
      for (int64_t b = 0; b < kUnroll * W::kStepBytes; b += kCacheLine) {
        const int64_t near = ahead.near_of(bytes_of<W>(k) + b);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          fetch_ahead(W::address(rows[r], k) + b, ahead.far, near);
        }
      }
    }
#pragma GCC unroll 16
    for (int u = 0; u < kUnroll; ++u) {
      multiply_step<W, kRows, kTokens>(rows, x, k + u * kStep, kStep, sum[u % kSums]);
    }
  }
  for (; k < k_end; k += kStep) {
    multiply_step<W, kRows, kTokens>(rows, x, k, min_of(kStep, k_end - k), sum[0]);
  }
  for (int u = 1; u < kSums; ++u)
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTokens; ++t) sum[0][r][t] = V::add(sum[0][r][t], sum[u][r][t]);
  for (int t = 0; t < kTokens; ++t) {
    V::F column[kRows];
    for (int r = 0; r < kRows; ++r) column[r] = sum[0][r][t];
    V::sums(column, out + t * out_stride);
  }
}

// `rows` weight rows from `first`, `step` apart, times `tokens` operand rows: out[t][r], with
// kRowBlock between tokens. What is read next lies `jump` bytes from where another row would.
//
// Up to kStreamTokens tokens, W::kStreamRows rows at a time. Where memory is the limit even then,
// that is one, a single sequential stream: the pattern that hardware prefetchers follow best (four
// rows in step, a page apart, read at half the speed on Zen 4). Above, W::kRows rows stay in L1
// while all the tokens pass over them.
template <class W>
struct Product {
  const moe::Matrix& matrix;
  int64_t expert;
  int64_t k_begin;  // the columns that the operands stand for
  int64_t k_count;
  const typename W::Operand* const* x;
  int64_t tokens;

  void operator()(int64_t first, int64_t step, int64_t rows, int64_t jump, float* out) const {
    int64_t r = 0;
    if (tokens > kStreamTokens) {
      r = in_step<W::kRows>(first, step, rows, jump, out);
    } else if constexpr (W::kStreamRows > 1) {
      r = in_step<W::kStreamRows>(first, step, rows, jump, out);
    }
    const PassesAhead ahead = passes_ahead(1, step, rows, jump);
    for (; r < rows; ++r) over_tokens<1>(first + r * step, step, ahead.from(r), out + r);
  }

 private:
  static constexpr int64_t kStreamTokens = 4;

  PassesAhead passes_ahead(int64_t count, int64_t step, int64_t rows, int64_t jump) const {
    return PassesAhead(count, step * matrix.row_bytes, bytes_of<W>(k_count), rows, jump);
  }

  // As many of the rows as are whole blocks of kRows; returns their number.
  template <int kRows>
  int64_t in_step(int64_t first, int64_t step, int64_t rows, int64_t jump, float* out) const {
    const PassesAhead ahead = passes_ahead(kRows, step, rows, jump);
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) {
      over_tokens<kRows>(first + r * step, step, ahead.from(r), out + r);
    }
    return r;
  }

  template <int kRows>
  void over_tokens(int64_t first, int64_t step, const PassAhead& ahead, float* out) const {
    typename W::Row row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = W::row(matrix, expert, first + r * step, k_begin);
    int64_t t = 0;
    if constexpr (kRows > 1) {
      if (tokens < 4) return rest<kRows, true>(row, 0, ahead, out);
      dot<W, kRows, 4, true>(row, x, k_count, ahead, out, kRowBlock);
      for (t = 4; t + 4 <= tokens; t += 4) {
        dot<W, kRows, 4, false>(row, x + t, k_count, ahead, out + t * kRowBlock, kRowBlock);
      }
      rest<kRows, false>(row, t, ahead, out);
    } else {
      for (; t + 4 <= tokens; t += 4) {
        dot<W, kRows, 4, true>(row, x + t, k_count, ahead, out + t * kRowBlock, kRowBlock);
      }
      rest<kRows, true>(row, t, ahead, out);
    }
  }

  // The last one to three tokens.
  template <int kRows, bool kPrefetch>
  void rest(const typename W::Row* row, int64_t t, const PassAhead& ahead, float* out) const {
    float* to = out + t * kRowBlock;
    switch (tokens - t) {
      case 3:
        return dot<W, kRows, 3, kPrefetch>(row, x + t, k_count, ahead, to, kRowBlock);
      case 2:
        return dot<W, kRows, 2, kPrefetch>(row, x + t, k_count, ahead, to, kRowBlock);
      case 1:
        return dot<W, kRows, 1, kPrefetch>(row, x + t, k_count, ahead, to, kRowBlock);
    }
  }
};

// W's own product, or the one above.
template <class W>
constexpr auto product_type() {
  if constexpr (requires { typename W::Product; }) {
    return static_cast<typename W::Product*>(nullptr);
  } else {
    return static_cast<Product<W>*>(nullptr);
  }
}
template <class W>
using ProductOf = std::remove_pointer_t<decltype(product_type<W>())>;

inline float load_scalar(const std::byte* values, moe::Dtype dtype, int64_t index) {
  switch (dtype) {
    case moe::Dtype::kBf16:
      return V::to_float(reinterpret_cast<const moe::Bf16*>(values)[index]);
    case moe::Dtype::kFp16:
      return V::to_float(reinterpret_cast<const moe::Fp16*>(values)[index]);
    case moe::Dtype::kFp32:
      break;
  }
  return reinterpret_cast<const float*>(values)[index];
}

// Bias rows `first`, `first + step`, ...; leaves `bias` as it is without one.
inline void load_bias(const moe::Layer& layer, const moe::Matrix& matrix, int64_t expert,
                      int64_t first, int64_t step, int64_t rows, float* bias) {
  if (matrix.bias == nullptr) return;
  for (int64_t r = 0; r < rows; ++r) {
    bias[r] = load_scalar(matrix.bias, layer.dtype, expert * matrix.rows + first + r * step);
  }
}

// Elements to operands, in the order that the format's weights are unpacked in, zeros after them.
template <class W, class Element>
inline void convert_rows(const Element* source, int64_t count, int64_t width, std::byte* x,
                         int64_t x_stride) {
  using Operand = typename W::Operand;
  static_assert(moe::kOperandAlign % W::kStep == 0, "rows are whole steps");
  for (int64_t t = 0; t < count; ++t) {
    const Element* from = source + t * width;
    Operand* to = reinterpret_cast<Operand*>(x) + t * x_stride;
    int64_t k = 0;
    for (; k + V::kWidth <= width; k += V::kWidth) V::store(to + k, V::load(from + k));
    for (; k < width; ++k) V::store_scalar(to + k, V::to_float(from[k]));
    for (; k < x_stride; ++k) V::store_scalar(to + k, 0.0f);
    for (k = 0; k < x_stride; k += W::kStep) W::arrange(to + k);
    if constexpr (requires { W::finish_row(to, width); }) W::finish_row(to, width);
  }
}

template <class W>
void prepare(const moe::Layer& layer, const void* source, int64_t count, std::byte* x,
             int64_t x_stride) {
  const int64_t width = layer.hidden;
  switch (layer.dtype) {
    case moe::Dtype::kFp32:
      return convert_rows<W>(static_cast<const float*>(source), count, width, x, x_stride);
    case moe::Dtype::kFp16:
      return convert_rows<W>(static_cast<const moe::Fp16*>(source), count, width, x, x_stride);
    case moe::Dtype::kBf16:
      return convert_rows<W>(static_cast<const moe::Bf16*>(source), count, width, x, x_stride);
  }
}

// Both products of one block, [tokens][kRowBlock] each, and their biases.
struct Block {
  alignas(64) float gate[kTokenBlock * kRowBlock];
  alignas(64) float up[kTokenBlock * kRowBlock];
  alignas(64) float gate_bias[kRowBlock] = {};
  alignas(64) float up_bias[kRowBlock] = {};
};

// The activated block over `gate`. Whole vectors are computed, beyond `rows` too.
inline void activate_block(const moe::Work& work, int64_t first_pair, int64_t tokens, int64_t rows,
                           Block& block) {
  const moe::Layer& layer = *work.layer;
  for (int64_t t = 0; t < tokens; ++t) {
    const float weight = layer.router_weight_on_input ? work.pair_weight[first_pair + t] : 1.0f;
    const V::F scale = V::set(weight);
    for (int64_t r = 0; r < rows; r += V::kWidth) {
      float* at = block.gate + t * kRowBlock + r;
      const V::F gate = V::fma(V::load(at), scale, V::load(block.gate_bias + r));
      if (layer.gated) {
        const float* up_at = block.up + t * kRowBlock + r;
        const V::F up = V::fma(V::load(up_at), scale, V::load(block.up_bias + r));
        V::store(at, activate(layer, gate, up));
      } else {
        V::store(at, activate_gate(layer, gate));
      }
    }
  }
}

// Bytes between two rows of a matrix, for what a product is told of those behind it.
inline int64_t jump_between(const moe::Matrix& matrix, int64_t from, int64_t to) {
  return (to - from) * matrix.row_bytes;
}

// Rows [row, row + rows) of both products of `tokens` tokens, activated.
template <class Product>
inline void up_block(const moe::Work& work, const Product& product, int64_t first_pair,
                     int64_t tokens, int64_t row, int64_t rows, Block& block) {
  const moe::Layer& layer = *work.layer;
  const int64_t step = layer.interleaved ? 2 : 1;
  const int64_t up_row = layer.interleaved ? 2 * row + 1 : layer.intermediate + row;
  const int64_t row_end = (row + rows) * step;
  product(row * step, step, rows, layer.gated ? jump_between(layer.w13, row_end, up_row) : 0,
          block.gate);
  load_bias(layer, layer.w13, product.expert, row * step, step, rows, block.gate_bias);
  if (layer.gated) {
    product(up_row, step, rows, jump_between(layer.w13, up_row + rows * step, row_end), block.up);
    load_bias(layer, layer.w13, product.expert, up_row, step, rows, block.up_bias);
  }
  activate_block(work, first_pair, tokens, rows, block);
}

// Rows that W passes over together, or as few rows as a task may have.
template <class W>
constexpr int64_t inner_align() {
  if constexpr (requires { W::kTaskRows; }) {
    return W::kTaskRows;
  } else {
    return moe::kRowAlign;
  }
}
template <class W>
constexpr int64_t kInnerAlign = inner_align<W>();

// Zeroes an inner row's elements past the last one.
template <class W>
inline void zero_padding(const moe::Work& work, typename W::Operand* inner) {
  int64_t k = work.inner_end - work.inner_begin;
  for (; k < work.inner_stride; ++k) V::store_scalar(inner + W::position(k), 0.0f);
}

// `count` activated values to columns [k, k + count) of an inner row.
template <class W>
inline void store_activated(const float* values, int64_t count, int64_t k,
                            typename W::Operand* inner) {
  constexpr int64_t kColumns = 16;
  for (int64_t r = 0; r < count; r += kColumns) {
    typename W::Operand operands[kColumns];
    for (int64_t i = 0; i < kColumns; i += V::kWidth) {
      V::store(operands + i, V::load(values + r + i));
    }
    if (count - r >= kColumns && (k + r) % kColumns == 0) {
      // Within so few columns positions are known here, but for where they begin.
      typename W::Operand* to = inner + W::position(k + r);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kColumns; ++i) to[W::position(i)] = operands[i];
    } else {
      const int64_t left = min_of(kColumns, count - r);
      for (int64_t i = 0; i < left; ++i) inner[W::position(k + r + i)] = operands[i];
    }
  }
}

inline void clear_sums(const moe::Work& work, int64_t begin, int64_t end) {
  if (work.accumulate) return;
  for (int64_t t = 0; t < work.tokens; ++t) {
    for (int64_t h = begin; h < end; ++h) work.sums[t * work.layer->hidden + h] = 0.0f;
  }
}

// Adds a block of w2's products, [tokens][kRowBlock], to the tokens' sums.
inline void add_block(const moe::Work& work, int64_t expert, int64_t first_pair, int64_t tokens,
                      int64_t row, int64_t rows, const float* block) {
  const moe::Layer& layer = *work.layer;
  alignas(64) float bias[kRowBlock] = {};
  if (work.inner_begin == 0) load_bias(layer, layer.w2, expert, row, 1, rows, bias);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t pair = first_pair + i;
    const float weight = layer.router_weight_on_input ? 1.0f : work.pair_weight[pair];
    float* sums = work.sums + work.pair_token[pair] * layer.hidden + row;
    for (int64_t r = 0; r < rows; ++r) sums[r] += weight * (block[i * kRowBlock + r] + bias[r]);
  }
}

inline void round_sums(const moe::Work& work, int64_t begin, int64_t end) {
  if (work.rounded == nullptr) return;
  const int64_t width = work.layer->hidden;
  for (int64_t t = 0; t < work.tokens; ++t) {
    for (int64_t h = begin; h < end; ++h) {
      work.rounded[t * width + h] = V::to_bf16(work.sums[t * width + h]);
    }
  }
}

template <class W>
void up(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end, std::byte*) {
  using Operand = typename W::Operand;
  const moe::Layer& layer = *work.layer;
  Block block;
  const Operand* x[kTokenBlock];
  for (int64_t t = 0; t < group.count; t += kTokenBlock) {
    const int64_t tokens = min_of(kTokenBlock, group.count - t);
    const int64_t pair = group.begin + t;
    for (int64_t i = 0; i < tokens; ++i) {
      x[i] = reinterpret_cast<const Operand*>(work.x) + work.pair_token[pair + i] * work.x_stride;
    }
    const ProductOf<W> product{layer.w13, group.expert, 0, layer.hidden, x, tokens};
    for (int64_t row = begin; row < end; row += kRowBlock) {
      const int64_t rows = min_of(kRowBlock, end - row);
      up_block(work, product, pair, tokens, row, rows, block);
      for (int64_t i = 0; i < tokens; ++i) {
        Operand* inner = reinterpret_cast<Operand*>(work.inner) + (pair + i) * work.inner_stride;
        if (row + rows == work.inner_end) zero_padding<W>(work, inner);
        store_activated<W>(block.gate + i * kRowBlock, rows, row - work.inner_begin, inner);
      }
    }
  }
}

template <class W>
void down_group(const moe::Work& work, const moe::Group& group, int64_t begin, int64_t end) {
  using Operand = typename W::Operand;
  const moe::Layer& layer = *work.layer;
  alignas(64) float block[kTokenBlock * kRowBlock];
  const Operand* inner[kTokenBlock];
  // The same rows of the next group come then, and behind the last one the next task.
  const bool is_last = &group + 1 == work.groups + work.group_count;
  const moe::Group& next = is_last ? work.groups[0] : (&group)[1];
  const int64_t jump = (next.expert - group.expert) * layer.w2.expert_bytes +
                       (is_last ? 0 : jump_between(layer.w2, end, begin));
  for (int64_t t = 0; t < group.count; t += kTokenBlock) {
    const int64_t tokens = min_of(kTokenBlock, group.count - t);
    const int64_t pair = group.begin + t;
    for (int64_t i = 0; i < tokens; ++i) {
      inner[i] = reinterpret_cast<const Operand*>(work.inner) + (pair + i) * work.inner_stride;
    }
    const int64_t columns = work.inner_end - work.inner_begin;
    const ProductOf<W> product{layer.w2, group.expert, work.inner_begin, columns, inner, tokens};
    for (int64_t row = begin; row < end; row += kRowBlock) {
      const int64_t rows = min_of(kRowBlock, end - row);
      product(row, 1, rows, row + rows < end ? 0 : jump, block);
      add_block(work, group.expert, pair, tokens, row, rows, block);
    }
  }
}

template <class W>
void down(const moe::Work& work, int64_t begin, int64_t end, std::byte*) {
  clear_sums(work, begin, end);
  for (int64_t g = 0; g < work.group_count; ++g) down_group<W>(work, work.groups[g], begin, end);
  round_sums(work, begin, end);
}

// The group's inner rows, once all of them are there.
template <class W>
void finish_rows(const moe::Work& work, const moe::Group& group) {
  auto* inner = reinterpret_cast<typename W::Operand*>(work.inner);
  for (int64_t i = 0; i < group.count; ++i) {
    W::finish_row(inner + (group.begin + i) * work.inner_stride, work.inner_end - work.inner_begin);
  }
}

template <class W>
constexpr auto finish_of() -> void (*)(const moe::Work&, const moe::Group&) {
  if constexpr (requires { W::finish_row(nullptr, 0); }) {
    return finish_rows<W>;
  } else {
    return nullptr;
  }
}

template <class W>
constexpr moe::Kernels kKernels{sizeof(typename W::Operand),
                                kInnerAlign<W>,
                                prepare<W>,
                                up<W>,
                                down<W>,
                                finish_of<W>(),
                                0,
                                nullptr,
                                nullptr};

}  // namespace
