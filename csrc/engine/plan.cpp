#include "engine/plan.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

namespace moe {
namespace {

// Enough for a few thousand tokens of the largest known models: a further pass over the weights is
// then a small part of the arithmetic it feeds. Pages that no batch reaches are never touched.
constexpr int64_t kScratchBytes = int64_t{1} << 30;

// Tasks a thread should find in a phase, so that the last ones to end do not keep it waiting long.
constexpr int64_t kTasksPerThread = 16;

// Rows of a task are multiples of this, but for few experts; those of the down product always:
// their sums are a cache line.
constexpr int64_t kUsualRows = 16;

// Where tokens are packed, the most rows of a task: the results of as many are kept from one panel
// of columns to the next.
constexpr int64_t kPackedRows = 16 * kRowBlock;

constexpr int64_t kPrepareTokens = 16;

// Scratch is counted for this many tokens at a time: whatever the top_k, whole cache lines.
constexpr int64_t kChunkUnit = 16;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

// Rows of a task when `rows` rows are cut for each of `repeats` groups: multiples of kUsualRows
// that give each thread many tasks. With one expert or two there are not that many: then as few
// rows, at least `least`, as let the threads end together. A task costs about a quarter of a row by
// itself.
int64_t rows_per_task(int64_t rows, int64_t repeats, int64_t threads, int64_t least) {
  const int64_t wanted = rows * repeats / (threads * kTasksPerThread);
  int64_t best = std::clamp(wanted / kUsualRows * kUsualRows, kUsualRows, kRowBlock);
  int64_t best_time = std::numeric_limits<int64_t>::max();
  for (int64_t size = best; size >= least; size -= least) {
    const int64_t time = ceil_div(ceil_div(rows, size) * repeats, threads) * (4 * size + 1);
    if (time < best_time) {
      best = size;
      best_time = time;
    }
  }
  return best;
}

// The same where tokens are packed. Each task reads all of its group's tokens, from the cache that
// the cores share, which takes about as long as half as many rows of weights do; and when the last
// ones end, the other threads have waited for half a task. So tasks are few and of many rows, at
// most `most`, and as many as the threads can share out evenly.
int64_t packed_rows_per_task(int64_t rows, int64_t repeats, int64_t threads, int64_t tokens_a_group,
                             int64_t most) {
  int64_t best = kRowBlock;
  int64_t best_time = std::numeric_limits<int64_t>::max();
  for (int64_t size = std::min(most, round_up(rows, kRowBlock)); size > 0; size -= kRowBlock) {
    const int64_t turns = ceil_div(ceil_div(rows, size) * repeats, threads);
    const int64_t time = (2 * turns + 1) * (2 * size + tokens_a_group);
    if (time < best_time) {
      best = size;
      best_time = time;
    }
  }
  return best;
}

// One a core less what vLLM's own process needs: its engine thread is busy while ours compute. With
// few cores that one would be missed more. Threads beyond what a container is granted would use
// that up by waiting for each other, and then all be stopped until its next period.
int default_threads(size_t cores) {
  const int granted = static_cast<int>(std::clamp(cpu_quota(), 1.0, static_cast<double>(cores)));
  return granted >= 4 ? granted - 1 : granted;
}

// Engines with as many threads share one pool, so that a process does not run several on its cores.
std::shared_ptr<Pool> shared_pool(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Pool>> pools;
  const std::vector<Core> cores = physical_cores();
  if (threads == 0) threads = default_threads(cores.size());
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
  int64_t source_stride;
  int64_t prepare_tasks;
  const int32_t* block_group;
  int64_t up_rows;
  // Blocks of up_rows rows of one group: where each node's end, and likewise the tasks over all
  // groups. A node's tasks come together, group after group.
  const std::vector<int64_t>& node_blocks;
  const std::vector<int64_t>& node_ends;
  std::atomic<int64_t>* unfinished;  // tasks of `up`, of each group
  int64_t down_rows;
  std::byte* buffers;
  int64_t buffer_stride;

  std::byte* buffer(int thread) const { return buffers + thread * buffer_stride; }
};

// Operand rows for some tokens, or one block of packed tokens.
void prepare_task(const void* context, int64_t task, int) {
  const Chunk& chunk = *static_cast<const Chunk*>(context);
  const Work& work = chunk.work;
  if (task >= chunk.prepare_tasks) {
    const int64_t block = task - chunk.prepare_tasks;
    const Group& group = work.groups[chunk.block_group[block]];
    chunk.kernels.pack(work, group, block - group.packed);
    return;
  }
  const int64_t begin = task * kPrepareTokens;
  const int64_t count = std::min(kPrepareTokens, work.tokens - begin);
  std::byte* x =
      const_cast<std::byte*>(work.x) + begin * work.x_stride * chunk.kernels.operand_bytes;
  const auto* source = static_cast<const std::byte*>(work.source) + begin * chunk.source_stride;
  chunk.kernels.prepare(*work.layer, source, count, x, work.x_stride);
}

void up_task(const void* context, int64_t task, int thread) {
  const Chunk& chunk = *static_cast<const Chunk*>(context);
  size_t node = 0;
  while (task >= chunk.node_ends[node]) ++node;
  const int64_t first_task = node == 0 ? 0 : chunk.node_ends[node - 1];
  const int64_t first_block = node == 0 ? 0 : chunk.node_blocks[node - 1];
  const int64_t blocks = chunk.node_blocks[node] - first_block;
  const int64_t index = (task - first_task) / blocks;
  const Group& group = chunk.work.groups[index];
  const int64_t block = first_block + (task - first_task) % blocks;
  const int64_t begin = chunk.work.inner_begin + block * chunk.up_rows;
  const int64_t end = std::min(begin + chunk.up_rows, chunk.work.inner_end);
  chunk.kernels.up(chunk.work, group, begin, end, chunk.buffer(thread));
  if (chunk.kernels.finish == nullptr) return;
  // Who does the last of them sees what the others have written.
  if (chunk.unfinished[index].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    chunk.kernels.finish(chunk.work, group);
  }
}

void down_task(const void* context, int64_t task, int thread) {
  const Chunk& chunk = *static_cast<const Chunk*>(context);
  const int64_t begin = task * chunk.down_rows;
  const int64_t end = std::min(begin + chunk.down_rows, chunk.work.layer->hidden);
  chunk.kernels.down(chunk.work, begin, end, chunk.buffer(thread));
}

}  // namespace

void Scratch::Free::operator()(std::byte* memory) const { std::free(memory); }

void Scratch::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  // In huge pages: a tile's rows and a token's sums each lie in another small one.
  constexpr size_t kPage = size_t{2} << 20;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kPage, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, bytes, MADV_HUGEPAGE);  // a kernel without them refuses, and small ones do
  memory_.reset(memory);
  bytes_ = bytes;
}

Engine::Engine(int threads, const std::string& isa) : Engine(shared_pool(threads), isa) {}

Engine::Engine(std::shared_ptr<Pool> pool, const std::string& isa)
    : isa_(select_isa(isa)),
      pool_(std::move(pool)),
      node_blocks_(pool_->node_threads().size()),
      node_ends_(pool_->node_threads().size()) {}

Runner& Engine::runner() const {
  pool_->require_usable();
  std::call_once(runner_made_, [this] { runner_ = std::make_unique<Runner>(*pool_); });
  return *runner_;
}

PhaseSeconds Engine::phase_seconds() {
  pool_->require_usable();
  const std::lock_guard<std::recursive_mutex> lock(pool_->mutex());
  return seconds_;
}

Plan::Plan(std::shared_ptr<Engine> engine, const Layer& layer, int64_t max_tokens, int64_t top_k)
    : engine_(std::move(engine)),
      layer_(layer),
      kernels_(*engine_->isa_.kernels(layer.format, layer.dtype)),
      top_k_(top_k),
      x_stride_(round_up(layer.hidden, kOperandAlign)),
      inner_stride_(round_up(layer.intermediate, kOperandAlign)) {
  if (max_tokens > kMostPlanTokens || top_k > kMostTopK) {
    throw std::invalid_argument("a plan of max_tokens=" + std::to_string(max_tokens) +
                                ", top_k=" + std::to_string(top_k) +
                                ", and the most is max_tokens=" + std::to_string(kMostPlanTokens) +
                                ", top_k=" + std::to_string(kMostTopK));
  }
  const auto sizes_of = [&](int64_t tokens) -> Sizes {
    constexpr auto kBf16 = static_cast<int64_t>(sizeof(Bf16));
    const int64_t pairs = tokens * top_k;
    const int64_t packed =
        PairSorter::max_blocks(pairs, layer.experts, kernels_.packed_tokens) * kPackBlock;
    return {.x = tokens * x_stride_ * kernels_.operand_bytes,
            .inner = pairs * inner_stride_ * kernels_.operand_bytes,
            .packed_x = packed * x_stride_ * kBf16,
            .packed_inner = packed * inner_stride_ * kBf16,
            .sums = tokens * x_stride_ * static_cast<int64_t>(sizeof(float))};
  };
  int64_t units = ceil_div(max_tokens, kChunkUnit);
  while (units > 1 && sizes_of(units * kChunkUnit).total() > kScratchBytes) {
    units -= ceil_div(units, 16);
  }
  chunk_ = std::min(units * kChunkUnit, max_tokens);
  sizes_ = sizes_of(units * kChunkUnit);
  if (kernels_.buffer_bytes != nullptr) buffer_stride_ = round_up(kernels_.buffer_bytes(layer), 64);
  const int64_t bytes = sizes_.total() + buffer_stride_ * engine_->threads();

  engine_->pool_->require_usable();
  const std::lock_guard<std::recursive_mutex> lock(engine_->pool_->mutex());
  engine_->scratch_.reserve(static_cast<size_t>(bytes));
  engine_->pairs_.reserve(chunk_ * top_k, layer.experts);
  const auto groups = static_cast<size_t>(layer.experts);
  if (engine_->unfinished_.size() < groups) {
    engine_->unfinished_ = std::vector<std::atomic<int64_t>>(groups);
  }
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
  const auto began = std::chrono::steady_clock::now();
  engine_->seconds_ = {};
  for (int64_t begin = 0; begin < routing.tokens; begin += chunk_) {
    run_chunk(job, routing, begin, std::min(begin + chunk_, routing.tokens));
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  engine_->seconds_.call = took.count();
}

void Plan::run_chunk(const Job& job, const Routing& routing, int64_t begin, int64_t end) const {
  PairSorter& pairs = engine_->pairs_;
  Pool& pool = *engine_->pool_;
  pairs.sort(routing, begin, end, layer_.experts, kernels_.packed_tokens);
  if (pairs.group_count() == 0 && job.accumulate) return;

  const int64_t source_stride = layer_.hidden * dtype_bytes(layer_.dtype);
  const int64_t first = begin * layer_.hidden;
  std::byte* x = engine_->scratch_.data();
  std::byte* inner = x + sizes_.x;
  std::byte* packed_x = inner + sizes_.inner;
  std::byte* packed_inner = packed_x + sizes_.packed_x;
  std::byte* sums = packed_inner + sizes_.packed_inner;
  std::byte* buffers = sums + sizes_.sums;
  Chunk chunk{.kernels = kernels_,
              .work = {.layer = &layer_,
                       .groups = pairs.groups(),
                       .group_count = pairs.group_count(),
                       .pair_token = pairs.pair_token(),
                       .pair_weight = pairs.pair_weight(),
                       .tokens = end - begin,
                       .source = static_cast<const std::byte*>(job.x) + begin * source_stride,
                       .x = x,
                       .x_stride = x_stride_,
                       .inner = inner,
                       .inner_stride = inner_stride_,
                       .packed_x = packed_x,
                       .packed_inner = packed_inner,
                       .inner_begin = job.inner_begin,
                       .inner_end = job.inner_end,
                       .sums = job.out_bf16 ? reinterpret_cast<float*>(sums)
                                            : static_cast<float*>(job.out) + first,
                       .accumulate = job.accumulate,
                       .rounded = job.out_bf16 ? static_cast<Bf16*>(job.out) + first : nullptr},
              .source_stride = source_stride,
              .prepare_tasks = pairs.all_packed() ? 0 : ceil_div(end - begin, kPrepareTokens),
              .block_group = pairs.block_group(),
              .up_rows = 0,
              .node_blocks = engine_->node_blocks_,
              .node_ends = engine_->node_ends_,
              .unfinished = engine_->unfinished_.data(),
              .down_rows = 0,
              .buffers = buffers,
              .buffer_stride = buffer_stride_};
  const int64_t inner_rows = job.inner_end - job.inner_begin;
  int64_t all_pairs = 0;
  for (int64_t g = 0; g < pairs.group_count(); ++g) all_pairs += pairs.groups()[g].count;
  const int64_t tokens_a_group = all_pairs / std::max<int64_t>(1, pairs.group_count());
  const bool packed = pairs.block_count() > 0;
  chunk.up_rows =
      packed ? packed_rows_per_task(inner_rows, pairs.group_count(), pool.threads(), tokens_a_group,
                                    kPackedRows / 2)
             : rows_per_task(inner_rows, pairs.group_count(), pool.threads(), kernels_.inner_align);
  chunk.down_rows =
      packed ? packed_rows_per_task(layer_.hidden, 1, pool.threads(), tokens_a_group, kPackedRows)
             : rows_per_task(layer_.hidden, 1, pool.threads(), kUsualRows);
  const int64_t blocks = ceil_div(inner_rows, chunk.up_rows);
  int64_t threads = 0;
  for (size_t node = 0; node < pool.node_threads().size(); ++node) {
    threads += pool.node_threads()[node];
    engine_->node_blocks_[node] = blocks * threads / pool.threads();
    engine_->node_ends_[node] = engine_->node_blocks_[node] * pairs.group_count();
  }
  for (int64_t g = 0; g < pairs.group_count(); ++g) {
    engine_->unfinished_[static_cast<size_t>(g)].store(blocks, std::memory_order_relaxed);
  }
  const Phase phases[] = {
      {chunk.prepare_tasks + pairs.block_count(), prepare_task},
      {blocks * pairs.group_count(), up_task, engine_->node_ends_.data()},
      {ceil_div(layer_.hidden, chunk.down_rows), down_task},
  };
  // One task is quicker done here than shared out with a barrier after it.
  const int first_phase = phases[0].count > 1 ? 0 : 1;
  if (phases[0].count == 1) prepare_task(&chunk, 0, 0);
  pool.run(phases + first_phase, 3 - first_phase, &chunk);
  PhaseSeconds& seconds = engine_->seconds_;
  if (first_phase == 0) seconds.prepare += pool.phase_seconds(0);
  seconds.up += pool.phase_seconds(1 - first_phase);
  seconds.down += pool.phase_seconds(2 - first_phase);
}

}  // namespace moe
