// What the test programs share: layers with random weights, batches, and counting failures.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

#include "engine/plan.h"

namespace moe_tests {

using moe::Format;

struct Case {
  Format format;
  int64_t hidden, intermediate, experts, group;
  bool zeros = false;  // kInt4: with zero points
};

// Memory whose end is the end of a page, with a page after it that may not be read.
class Guarded {
 public:
  explicit Guarded(size_t bytes) {
    constexpr size_t kPage = 4096;
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    mapped_ = whole + kPage;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_ + whole, kPage, PROT_NONE);
    data_ = base_ + whole - bytes;
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* base_;
  std::byte* data_;
  size_t mapped_;
};

// Truncated: the values only have to be sane.
inline moe::Bf16 to_bf16(float value) {
  return {static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16)};
}

// Weights of a layer in exactly the memory they need.
class Shard {
 public:
  Shard(const Case& c, uint32_t seed) : random_(seed) {
    layer_.w13 = matrix(c, 2 * c.intermediate, c.hidden, 2);
    layer_.w2 = matrix(c, c.hidden, c.intermediate, 1);
    layer_.experts = c.experts;
    layer_.hidden = c.hidden;
    layer_.intermediate = c.intermediate;
    layer_.format = c.format;
    layer_.dtype = moe::Dtype::kBf16;  // which every instruction set has its kernels for
    layer_.activation = moe::Activation::kSilu;
    layer_.gated = true;
    layer_.interleaved = false;
    layer_.alpha = 1.0f;
    layer_.beta = 0.0f;
    layer_.limit = INFINITY;
    layer_.router_weight_on_input = false;
  }
  const moe::Layer& layer() const { return layer_; }

 private:
  const std::byte* random_bytes(size_t count, bool bf16) {
    std::byte* memory = memory_.emplace_back(std::make_unique<Guarded>(count))->data();
    for (size_t i = 0; i < count; ++i) {
      // The high byte of a bf16 decides its size: around 0.01 to 0.5.
      const uint32_t value =
          bf16 && i % 2 == 1 ? 0x3c + random_() % 3 + (random_() % 2 << 7) : random_() % 128;
      memory[i] = static_cast<std::byte>(value);
    }
    return memory;
  }
  template <class Scale>
  const std::byte* scales(size_t count, bool e4m3 = false) {
    std::byte* memory =
        memory_.emplace_back(std::make_unique<Guarded>(count * sizeof(Scale)))->data();
    for (size_t i = 0; i < count; ++i) {
      const float value = 0.001f * static_cast<float>(1 + random_() % 4);
      Scale scale;
      if constexpr (std::is_same_v<Scale, moe::Bf16>) {
        scale = to_bf16(value);
      } else if constexpr (std::is_same_v<Scale, uint8_t>) {
        // e8m0: around 0.001; e4m3: around 1
        scale = static_cast<uint8_t>(e4m3 ? 52 + random_() % 8 : 116 + random_() % 3);
      } else {
        scale = value;
      }
      std::memcpy(memory + i * sizeof scale, &scale, sizeof scale);
    }
    return memory;
  }
  moe::Matrix matrix(const Case& c, int64_t rows, int64_t columns, int64_t parts) {
    moe::Matrix m{};
    const bool is_byte = c.format == Format::kFp8 || c.format == Format::kInt8;
    m.row_bytes = c.format == Format::kBf16 ? 2 * columns : is_byte ? columns : columns / 2;
    m.expert_bytes = rows * m.row_bytes;
    m.rows = rows;
    m.part_rows = rows / parts;
    m.weight =
        random_bytes(static_cast<size_t>(c.experts * m.expert_bytes), c.format == Format::kBf16);
    m.scale_block_rows = 1;
    if (c.format == Format::kBf16) return m;
    const int64_t groups = (columns + c.group - 1) / c.group;
    const auto count = static_cast<size_t>(c.experts * rows * groups);
    const bool is_e4m3 = c.format == Format::kNvfp4;
    const bool is_code = is_e4m3 || c.format == Format::kMxfp4;
    m.scale = c.format == Format::kInt4 ? scales<moe::Bf16>(count)
              : is_code                 ? scales<uint8_t>(count, is_e4m3)
                                        : scales<float>(count);
    m.scale_row_bytes = groups * (c.format == Format::kInt4 ? 2 : is_code ? 1 : 4);
    if (is_e4m3) {
      m.global = reinterpret_cast<const float*>(scales<float>(static_cast<size_t>(c.experts)));
    }
    if (c.zeros) m.zero = random_bytes(count / 2, false);
    m.scale_part_rows = m.part_rows;
    m.scale_expert_bytes = rows * m.scale_row_bytes;
    while ((int64_t{1} << m.scale_shift) < c.group) ++m.scale_shift;
    return m;
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Guarded>> memory_;
  moe::Layer layer_{};
};

struct Batch {
  std::vector<moe::Bf16> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int64_t tokens, top_k;

  Batch(const moe::Layer& layer, int64_t tokens, int64_t top_k, uint32_t seed)
      : tokens(tokens), top_k(top_k) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tokens * layer.hidden; ++i) x.push_back(to_bf16(normal(random)));
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(layer.experts + 1)) - 1);
      weights.push_back(0.1f + static_cast<float>(random() % 100) / 100.0f);
    }
  }
  moe::Routing routing() const { return {ids.data(), weights.data(), tokens, top_k, nullptr, 0}; }
};

inline std::vector<float> run(const moe::Plan& plan, const Batch& batch) {
  std::vector<float> out(static_cast<size_t>(batch.tokens * plan.layer().hidden), NAN);
  const Guarded x(batch.x.size() * sizeof(moe::Bf16));
  std::memcpy(x.data(), batch.x.data(), batch.x.size() * sizeof(moe::Bf16));
  plan.run({.x = x.data(),
            .out = out.data(),
            .out_bf16 = false,
            .accumulate = false,
            .inner_begin = 0,
            .inner_end = plan.layer().intermediate},
           batch.routing());
  return out;
}

// In fp16_test.cpp.
void test_fp16();
// In doorbell_test.cpp.
void test_doorbell();

inline std::atomic<int> failures{0};

inline void expect(bool good, const char* what) {
  if (good) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

}  // namespace moe_tests
