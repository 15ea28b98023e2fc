// The engine without Python, to be run under sanitizers: every instruction set against the scalar
// one, weights and operands that end where a page does (reading on is a fault), two callers at
// once, errors.
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "engine/plan.h"
#include "engine/topology.h"

namespace {

using moe::Format;

struct Case {
  Format format;
  int64_t hidden, intermediate, experts, group;
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
moe::Bf16 to_bf16(float value) {
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
  const std::byte* scales(size_t count) {
    std::byte* memory =
        memory_.emplace_back(std::make_unique<Guarded>(count * sizeof(Scale)))->data();
    for (size_t i = 0; i < count; ++i) {
      const float value = 0.001f * static_cast<float>(1 + random_() % 4);
      Scale scale;
      if constexpr (std::is_same_v<Scale, moe::Bf16>) {
        scale = to_bf16(value);
      } else {
        scale = value;
      }
      std::memcpy(memory + i * sizeof scale, &scale, sizeof scale);
    }
    return memory;
  }
  moe::Matrix matrix(const Case& c, int64_t rows, int64_t columns, int64_t parts) {
    moe::Matrix m{};
    m.row_bytes = c.format == Format::kBf16  ? 2 * columns
                  : c.format == Format::kFp8 ? columns
                                             : columns / 2;
    m.expert_bytes = rows * m.row_bytes;
    m.rows = rows;
    m.part_rows = rows / parts;
    m.weight =
        random_bytes(static_cast<size_t>(c.experts * m.expert_bytes), c.format == Format::kBf16);
    m.scale_block_rows = 1;
    m.global_parts = 1;
    if (c.format == Format::kBf16) return m;
    const int64_t groups = (columns + c.group - 1) / c.group;
    const auto count = static_cast<size_t>(c.experts * rows * groups);
    const bool int4 = c.format == Format::kInt4;
    m.scale = int4 ? scales<moe::Bf16>(count) : scales<float>(count);
    m.scale_row_bytes = groups * static_cast<int64_t>(int4 ? sizeof(moe::Bf16) : sizeof(float));
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

std::vector<float> run(const moe::Plan& plan, const Batch& batch) {
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

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / (norm > 0 ? norm : 1));
}

int failures = 0;

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

void test_sets_agree(const Case& c) {
  const Shard shard(c, 1);
  const auto scalar = std::make_shared<moe::Engine>(1, "scalar");
  for (const int64_t tokens : {1, 3, 7, 40, 70}) {
    const Batch batch(shard.layer(), tokens, 3, static_cast<uint32_t>(tokens));
    const auto expected = run(moe::Plan(scalar, shard.layer(), 32, 3), batch);
    for (const moe::Isa& isa : moe::available_isas()) {
      for (const int threads : {1, 0}) {
        const auto engine = std::make_shared<moe::Engine>(threads, isa.name);
        const moe::Plan plan(engine, shard.layer(), 32, 3);
        expect(relative_error(run(plan, batch), expected) < 5e-3, isa.name);
      }
    }
  }
}

// Cores said to be on nodes of their own: other shares, the same sums.
void test_nodes(const Case& c) {
  const Shard shard(c, 4);
  std::vector<moe::Core> cores = moe::physical_cores();
  const auto flat = std::make_shared<moe::Engine>(1, "");
  for (size_t i = 0; i < cores.size(); ++i) cores[i].node = static_cast<int>(i);
  const auto pool = std::make_shared<moe::Pool>(cores, static_cast<int>(cores.size()));
  const auto split = std::make_shared<moe::Engine>(pool, "");
  for (const int64_t tokens : {1, 9, 50}) {
    const Batch batch(shard.layer(), tokens, 3, static_cast<uint32_t>(tokens));
    const auto expected = run(moe::Plan(flat, shard.layer(), 64, 3), batch);
    expect(run(moe::Plan(split, shard.layer(), 64, 3), batch) == expected, "nodes");
  }
}

void test_two_callers(const Case& c) {
  const Shard shard(c, 2);
  const auto engine = std::make_shared<moe::Engine>(0, "");
  const auto call = [&](uint32_t seed) {
    const moe::Plan plan(engine, shard.layer(), 8, 2);
    const Batch batch(shard.layer(), 5 + seed, 2, seed);
    const auto first = run(plan, batch);
    for (int i = 0; i < 100; ++i) expect(run(plan, batch) == first, "two callers");
  };
  std::thread other(call, 1);
  call(2);
  other.join();
}

void test_errors(const Case& c) {
  const Shard shard(c, 3);
  const moe::Plan plan(std::make_shared<moe::Engine>(0, ""), shard.layer(), 8, 2);
  Batch batch(shard.layer(), 4, 2, 3);
  batch.ids[5] = static_cast<int32_t>(c.experts);
  bool thrown = false;
  try {
    run(plan, batch);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  expect(thrown, "an id out of range");

  moe::Pool pool(moe::physical_cores(), static_cast<int>(moe::physical_cores().size()));
  const moe::Phase phases[] = {{50,
                                [](const void*, int64_t task, int) {
                                  if (task == 7) throw std::runtime_error("7");
                                }},
                               {50, [](const void*, int64_t, int) {}}};
  for (int i = 0; i < 200; ++i) {
    thrown = false;
    try {
      pool.run(phases, 2, nullptr);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    expect(thrown, "a task's exception");
  }
}

}  // namespace

int main() {
  const Case cases[] = {{Format::kBf16, 70, 33, 4, 1},
                        {Format::kBf16, 128, 64, 4, 1},
                        {Format::kFp8, 150, 77, 4, 128},
                        {Format::kInt4, 96, 160, 4, 32},
                        {Format::kInt4, 384, 256, 4, 128}};
  for (const Case& c : cases) test_sets_agree(c);
  for (const Case& c : cases) test_nodes(c);
  test_two_callers(cases[0]);
  test_errors(cases[0]);
  std::printf(failures == 0 ? "ok\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
