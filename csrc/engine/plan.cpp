#include "engine/plan.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

namespace moe {
namespace {

// Enough for a few thousand tokens of the largest known models: a further pass over the weights is
// then a small part of the arithmetic it feeds.
constexpr int64_t kScratchBytes = int64_t{256} << 20;

// Tasks a thread should find in a phase, so that the last ones to end do not keep it waiting long.
constexpr int64_t kTasksPerThread = 16;

constexpr int64_t kPrepareTokens = 16;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

// Rows of a task when `rows` rows are cut for each of `repeats` groups.
int64_t rows_per_task(int64_t rows, int64_t repeats, int64_t threads) {
  const int64_t wanted = rows * repeats / (threads * kTasksPerThread);
  return std::clamp(wanted / kRowAlign * kRowAlign, kRowAlign, kRowBlock);
}

// Engines with as many threads share one pool, so that a process does not run several on its cores.
std::shared_ptr<Pool> shared_pool(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Pool>> pools;
  const std::vector<Core> cores = physical_cores();
  if (threads == 0) threads = static_cast<int>(cores.size());
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Pool> pool = pools[threads].lock();
  if (pool == nullptr || !pool->usable()) {
    pool = std::make_shared<Pool>(cores, threads);
    pools[threads] = pool;
  }
  return pool;
}

// What the tasks of one chunk read.
struct Chunk {
  const Kernels& kernels;
  Work work;
  const std::byte* source;
  int64_t source_stride;
  int64_t up_rows;
  int64_t up_tasks;  // of one group
  int64_t down_rows;
};

void prepare_task(const void* context, int64_t task) {
  const Chunk& chunk = *static_cast<const Chunk*>(context);
  const Work& work = chunk.work;
  const int64_t begin = task * kPrepareTokens;
  const int64_t count = std::min(kPrepareTokens, work.tokens - begin);
  std::byte* x =
      const_cast<std::byte*>(work.x) + begin * work.x_stride * chunk.kernels.operand_bytes;
  chunk.kernels.prepare(*work.layer, chunk.source + begin * chunk.source_stride, count, x,
                        work.x_stride);
}

void up_task(const void* context, int64_t task) {
  const Chunk& chunk = *static_cast<const Chunk*>(context);
  const int64_t begin = chunk.work.inner_begin + task % chunk.up_tasks * chunk.up_rows;
  const int64_t end = std::min(begin + chunk.up_rows, chunk.work.inner_end);
  chunk.kernels.up(chunk.work, chunk.work.groups[task / chunk.up_tasks], begin, end);
}

void down_task(const void* context, int64_t task) {
  const Chunk& chunk = *static_cast<const Chunk*>(context);
  const int64_t begin = task * chunk.down_rows;
  chunk.kernels.down(chunk.work, begin,
                     std::min(begin + chunk.down_rows, chunk.work.layer->hidden));
}

}  // namespace

void Scratch::Free::operator()(std::byte* memory) const { std::free(memory); }

void Scratch::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  constexpr size_t kPage = 4096;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kPage, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  memory_.reset(memory);
  bytes_ = bytes;
}

Engine::Engine(int threads, const std::string& isa)
    : isa_(select_isa(isa)), pool_(shared_pool(threads)) {}

Plan::Plan(std::shared_ptr<Engine> engine, const Layer& layer, int64_t max_tokens, int64_t top_k)
    : engine_(std::move(engine)),
      layer_(layer),
      kernels_(*engine_->isa_.kernels(layer.format, layer.dtype)),
      top_k_(top_k),
      x_stride_(round_up(layer.hidden, kOperandAlign)),
      inner_stride_(round_up(layer.intermediate, kOperandAlign)) {
  const int64_t x_bytes = x_stride_ * kernels_.operand_bytes;
  const int64_t inner_bytes = top_k * inner_stride_ * kernels_.operand_bytes;
  const int64_t sums_bytes = x_stride_ * static_cast<int64_t>(sizeof(float));
  const int64_t token_bytes = x_bytes + inner_bytes + sums_bytes;
  chunk_ = std::clamp(kScratchBytes / token_bytes, int64_t{1}, max_tokens);
  inner_offset_ = chunk_ * x_bytes;
  sums_offset_ = inner_offset_ + chunk_ * inner_bytes;
  engine_->pool_->require_usable();
  const std::lock_guard<std::recursive_mutex> lock(engine_->pool_->mutex());
  engine_->scratch_.reserve(static_cast<size_t>(chunk_ * token_bytes));
  engine_->pairs_.reserve(chunk_ * top_k, layer.experts);
}

void Plan::run(const Job& job, const Routing& routing) const {
  if (routing.top_k > top_k_) {
    throw std::invalid_argument("topk_ids has " + std::to_string(routing.top_k) +
                                " experts a token, and this plan was made for at most " +
                                std::to_string(top_k_) + ": make it with a larger top_k");
  }
  check_routing(routing, layer_.experts);
  engine_->pool_->require_usable();
  const std::lock_guard<std::recursive_mutex> lock(engine_->pool_->mutex());
  for (int64_t begin = 0; begin < routing.tokens; begin += chunk_) {
    run_chunk(job, routing, begin, std::min(begin + chunk_, routing.tokens));
  }
}

void Plan::run_chunk(const Job& job, const Routing& routing, int64_t begin, int64_t end) const {
  PairSorter& pairs = engine_->pairs_;
  Pool& pool = *engine_->pool_;
  pairs.sort(routing, begin, end, layer_.experts);
  if (pairs.group_count() == 0 && job.accumulate) return;

  const int64_t source_stride = layer_.hidden * dtype_bytes(layer_.dtype);
  std::byte* scratch = engine_->scratch_.data();
  const int64_t first = begin * layer_.hidden;
  Bf16* rounded = job.out_bf16 ? static_cast<Bf16*>(job.out) + first : nullptr;
  float* sums = job.out_bf16 ? reinterpret_cast<float*>(scratch + sums_offset_)
                             : static_cast<float*>(job.out) + first;
  Chunk chunk{.kernels = kernels_,
              .work = {.layer = &layer_,
                       .groups = pairs.groups(),
                       .group_count = pairs.group_count(),
                       .pair_token = pairs.pair_token(),
                       .pair_weight = pairs.pair_weight(),
                       .tokens = end - begin,
                       .x = scratch,
                       .x_stride = x_stride_,
                       .inner = scratch + inner_offset_,
                       .inner_stride = inner_stride_,
                       .inner_begin = job.inner_begin,
                       .inner_end = job.inner_end,
                       .sums = sums,
                       .accumulate = job.accumulate,
                       .rounded = rounded},
              .source = static_cast<const std::byte*>(job.x) + begin * source_stride,
              .source_stride = source_stride,
              .up_rows = 0,
              .up_tasks = 0,
              .down_rows = 0};
  const int64_t inner_rows = job.inner_end - job.inner_begin;
  chunk.up_rows = rows_per_task(inner_rows, pairs.group_count(), pool.threads());
  chunk.up_tasks = ceil_div(inner_rows, chunk.up_rows);
  chunk.down_rows = rows_per_task(layer_.hidden, 1, pool.threads());

  const Phase phases[] = {
      {ceil_div(end - begin, kPrepareTokens), prepare_task},
      {chunk.up_tasks * pairs.group_count(), up_task},
      {ceil_div(layer_.hidden, chunk.down_rows), down_task},
  };
  if (phases[0].count > 1) {
    pool.run(phases, 3, &chunk);
  } else {
    // One task is quicker done here than shared out with a barrier after it.
    prepare_task(&chunk, 0);
    pool.run(phases + 1, 2, &chunk);
  }
}

}  // namespace moe
