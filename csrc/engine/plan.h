// An engine (threads, kernels, scratch) and the plans made with it (one a layer's shard).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/pool.h"
#include "engine/routing.h"
#include "engine/runner.h"
#include "kernels/isa.h"
#include "kernels/kernel.h"

namespace moe {

// Memory that the tasks of one call share. Sized to the largest plan of the engine.
class Scratch {
 public:
  // Grows to at least `bytes`; what was there is lost. Throws std::bad_alloc.
  void reserve(size_t bytes);
  std::byte* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte[], Free> memory_;
  size_t bytes_ = 0;
};

// How long a call took, and its phases.
struct PhaseSeconds {
  double prepare;  // operands of the tokens; 0 where that was too little to share out
  double up;       // w13 and the activation
  double down;     // w2 and the sums
  double call;     // all of it, from when no other call had the threads
};

// NUMA: of w2's rows, of the gate rows and of the up rows of every expert, each node's threads
// compute a contiguous share in proportion to their number, in the order of the nodes, and take
// from others' only when theirs are done. Weights are best placed likewise.
class Engine {
 public:
  // `threads` 0: one for each physical core that the process may use, or CPU that its cgroup grants
  // it if these are fewer, less one of four or more.
  // `isa` empty: the fastest there is.
  Engine(int threads, const std::string& isa);
  Engine(std::shared_ptr<Pool> pool, const std::string& isa);

  int threads() const { return pool_->threads(); }
  const Isa& isa() const { return isa_; }
  Pool& pool() { return *pool_; }
  const Pool& pool() const { return *pool_; }
  // Started by the first call. A call given to it must not own the engine, which waits for its end.
  // Throws where the pool is not usable, or the thread cannot start.
  Runner& runner() const;
  // Of the last call of any plan; waits for one in progress. Throws where the pool is not usable.
  PhaseSeconds phase_seconds();

 private:
  friend class Plan;
  const Isa& isa_;
  std::shared_ptr<Pool> pool_;
  // Guarded by the pool's mutex.
  Scratch scratch_;
  PairSorter pairs_;
  PhaseSeconds seconds_{};
  std::vector<int64_t> node_blocks_;  // of the call in progress: see Plan::run_chunk
  std::vector<int64_t> node_ends_;
  std::vector<std::atomic<int64_t>> unfinished_;  // tasks of `up` that each group still waits for
  mutable std::once_flag runner_made_;
  mutable std::unique_ptr<Runner> runner_;  // ends before the pool does
};

// The most a plan can be made for: sizes of scratch then fit 64 bits for any layer of up to 2^22
// columns. No batch is larger, and one that were would run in parts.
inline constexpr int64_t kMostPlanTokens = int64_t{1} << 24;
inline constexpr int64_t kMostTopK = int64_t{1} << 10;

// What one call computes besides its routing.
struct Job {
  const void* x;  // [T, H] in the layer's dtype
  void* out;      // [T, H] float32, or bf16
  bool out_bf16;
  bool accumulate;      // add to `out`, which is float32 then
  int64_t inner_begin;  // the part of the intermediate dimension to compute; b2 counts with the
  int64_t inner_end;    // part that begins at 0
};

class Plan {
 public:
  // The layer's memory must outlive the plan. Batches of any size run, `max_tokens` at most (and
  // fewer where scratch would pass its bound) sharing one pass over the weights.
  // Throws std::invalid_argument for more than kMostPlanTokens or kMostTopK.
  Plan(std::shared_ptr<Engine> engine, const Layer& layer, int64_t max_tokens, int64_t top_k);

  // out (+)= the routed experts' weighted sum. Tokens without an expert in this shard get zeros, or
  // keep `out` when accumulating.
  // Throws std::invalid_argument (see check_routing) before anything is written.
  void run(const Job& job, const Routing& routing) const;

  const Layer& layer() const { return layer_; }
  const Engine& engine() const { return *engine_; }
  // The most experts of a token.
  int64_t top_k() const { return top_k_; }

 private:
  void run_chunk(const Job& job, const Routing& routing, int64_t begin, int64_t end) const;

  const std::shared_ptr<Engine> engine_;
  const Layer layer_;
  const Kernels& kernels_;
  const int64_t top_k_;
  int64_t x_stride_;
  int64_t inner_stride_;
  int64_t chunk_;  // tokens that share one pass

  // Bytes of the parts of the scratch, in this order; after them, a buffer for each thread.
  struct Sizes {
    int64_t x = 0, inner = 0, packed_x = 0, packed_inner = 0, sums = 0;

    int64_t total() const { return x + inner + packed_x + packed_inner + sums; }
  };
  Sizes sizes_;
  int64_t buffer_stride_ = 0;
};

}  // namespace moe
