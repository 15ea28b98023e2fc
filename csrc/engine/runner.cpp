#include "engine/runner.h"

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "engine/lost.h"
#include "engine/wait.h"

namespace moe {

Runner::Runner(const Pool& pool) : pool_(pool) {
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw std::runtime_error(
        std::string("a call was started, and the operating system did not let the thread that runs "
                    "it start (") +
        error.what() + "): raise the limit on processes or memory");
  }
}

Runner::~Runner() {
  if (!pool_.usable()) {
    forget(thread_);
    return;
  }
  turns_.fetch_add(1, std::memory_order_release);
  turns_.notify_one();
  thread_.join();
}

std::shared_future<double> Runner::run(std::function<double()> call) {
  std::packaged_task<double()> task(std::move(call));
  std::shared_future<double> result = task.get_future().share();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    given_.push_back(std::move(task));
  }
  turns_.fetch_add(1, std::memory_order_release);
  turns_.notify_one();
  return result;
}

void Runner::serve() {
  pool_.pin_caller();
  for (uint32_t turn = 0;; ++turn) {
    wait_for_change(turns_, turn, pool_.spin());
    std::unique_lock<std::mutex> lock(mutex_);
    if (given_.empty()) return;
    std::packaged_task<double()> task = std::move(given_.front());
    given_.pop_front();
    lock.unlock();
    task();
  }
}

}  // namespace moe
