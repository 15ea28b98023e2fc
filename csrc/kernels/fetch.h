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

[[gnu::always_inline]] inline void fetch_ahead(const std::byte* weights, int64_t ahead) {
  __builtin_prefetch(weights + ahead, 0, 2);
  __builtin_prefetch(weights + kNearBytes, 0, 3);
}

}  // namespace
