// How weights that are read one after another are fetched ahead; by the kernels, and by what
// measures the memory they read.
//
// In an anonymous namespace: see kernels/body.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

// Weights are fetched twice: to L2 some KiB ahead, and from there to L1 just before they are used.
// A line on its way to L1 holds one of a dozen buffers for as long as memory takes, and with those
// alone in flight a core does not get its share of memory (two threads of AVX-512, one token: bf16
// 25 GB/s, with both 29; INT4 21 and 25).
constexpr int64_t kNearBytes = 512;
// Enough for the latency of memory at the few bytes a cycle that a core gets of it.
constexpr int64_t kAheadBytes = 4096;

// How far ahead of a pass over rows that are read together is what follows.
struct PassAhead {
  int64_t far;
  int64_t near;
  int64_t near_behind;  // from byte `last` of a row on: of the pass after
  int64_t last;

  // Of byte `at` of a row.
  int64_t near_of(int64_t at) const { return at < last ? near : near_behind; }
};

// `rows` rows, `stride` bytes apart, read in passes over `count` of them together, of each the
// first `used` bytes. What is read after the last one lies `jump` bytes from where another row
// would.
class PassesAhead {
 public:
  PassesAhead(int64_t count, int64_t stride, int64_t used, int64_t rows, int64_t jump)
      : count_(count),
        pass_(count * stride),
        used_(used),
        rows_(rows),
        jump_(jump),
        far_((kAheadBytes + pass_ - 1) / pass_),
        near_(kNearBytes / used) {}

  // Of the pass from `row` on.
  PassAhead from(int64_t row) const {
    const int64_t near = kNearBytes - near_ * used_;
    return {passes(row, far_), passes(row, near_) + near, passes(row, near_ + 1) + near - used_,
            used_ - near};
  }

 private:
  int64_t passes(int64_t row, int64_t number) const {
    return number * pass_ + (row + number * count_ < rows_ ? 0 : jump_);
  }

  int64_t count_;
  int64_t pass_;
  int64_t used_;
  int64_t rows_;
  int64_t jump_;
  int64_t far_;   // passes
  int64_t near_;  // whole ones
};

[[gnu::always_inline]] inline void fetch_ahead(const std::byte* weights, int64_t far,
                                               int64_t near = kNearBytes) {
  __builtin_prefetch(weights + far, 0, 2);
  __builtin_prefetch(weights + near, 0, 3);
}

}  // namespace
