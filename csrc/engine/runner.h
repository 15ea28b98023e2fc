// A thread that runs calls while whoever gave them goes on.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "engine/pool.h"

namespace moe {

// One thread, on the core that a pool leaves to its callers. It is there before a call comes:
// making a thread takes longer than a small call. Between calls it watches for the next one as long
// as the pool's threads do, then sleeps.
class Runner {
 public:
  // `pool` must outlive this. Throws std::runtime_error where the thread cannot start.
  explicit Runner(const Pool& pool);
  // Waits for all that was given. In a forked process, which has no such thread, for nothing.
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Runs `call` behind all that was given before. The future holds what it returns or has thrown.
  std::shared_future<double> run(std::function<double()> call);

 private:
  void serve();

  const Pool& pool_;
  std::mutex mutex_;
  std::deque<std::packaged_task<double()>> given_;
  // How many calls have been given, and one more at the end: a turn without a call.
  alignas(64) std::atomic<uint32_t> turns_{0};
  std::thread thread_;
};

}  // namespace moe
