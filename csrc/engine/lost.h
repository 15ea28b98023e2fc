// Threads that a forked process knows of and does not have.
#pragma once

#include <thread>
#include <utility>

namespace moe {

// Lets go of a thread that stayed in the parent. Neither joined nor detached: its number may by now
// be that of a thread this process has started.
inline void forget(std::thread& lost) {
  if (lost.joinable()) new std::thread(std::move(lost));
}

}  // namespace moe
