// How a thread waits for another to say something.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "engine/pause.h"

namespace moe {

// Waits until `value` differs from `seen`: spins, then sleeps.
inline void wait_for_change(const std::atomic<uint32_t>& value, uint32_t seen,
                            std::chrono::microseconds spin) {
  const auto deadline = std::chrono::steady_clock::now() + spin;
  for (int i = 0;; ++i) {
    if (value.load(std::memory_order_acquire) != seen) return;
    pause();
    if (i % 64 == 63 && std::chrono::steady_clock::now() > deadline) break;
  }
  value.wait(seen, std::memory_order_acquire);
}

}  // namespace moe
