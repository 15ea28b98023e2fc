// A persistent, pinned thread pool that runs phases of tasks.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/topology.h"

namespace moe {

// `count` independent tasks: run(context, i, thread) for each i in [0, count), in any order, by any
// of the threads [0, threads).
struct Phase {
  int64_t count;
  void (*run)(const void* context, int64_t task, int thread);
  // Where the tasks of each NUMA node end, one number for each of the pool's nodes: a node's
  // threads begin with its tasks. Null: the tasks are shared out evenly, in the order of the
  // threads, which is that of the nodes.
  const int64_t* node_ends = nullptr;
};

// The calling thread works too, so a pool of n threads starts n - 1, each pinned to a core of its
// own; the first core is left to the caller, which is not pinned, but moved there by a call that
// finds it on another thread's core: each would have half of that. Between calls the threads watch
// for work briefly, then sleep: an idle pool uses no core.
class Pool {
 public:
  // Throws std::invalid_argument unless 1 <= threads <= cores.size(), and std::runtime_error where
  // the operating system does not let that many start.
  Pool(const std::vector<Core>& cores, int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs the phases one after another; a phase starts when every task of the one before has ended.
  // Calls from several threads take turns. The first exception of a task is thrown here when all
  // have ended (later phases are then skipped). Throws where the pool is not usable.
  void run(const Phase* phases, int count, const void* context);

  // How long a thread watches for the next call before it sleeps. Long enough, and it is awake for
  // a call that is known to come: waking sleeping threads costs some 50 us.
  void spin_for(std::chrono::microseconds spin);
  std::chrono::microseconds spin() const { return spin_.load(std::memory_order_relaxed); }

  // Pins the calling thread to the core left to the caller: for a thread that does little else.
  void pin_caller() const;

  // Moves the calling thread off the pool's cores, if it may run on others: for one that has work
  // of its own while another one's call runs, in which all threads wait for the slowest.
  void leave_cores() const;

  // How long phase `i` of the last call took; to be asked with the mutex held.
  double phase_seconds(int i) const {
    const auto at = static_cast<size_t>(i);
    return std::chrono::duration<double>(times_[at + 1] - times_[at]).count();
  }

  int threads() const { return threads_; }
  // Threads of each NUMA node that has any, in the order of the threads.
  const std::vector<int>& node_threads() const { return node_threads_; }
  // False in a process forked from the one that made the pool.
  bool usable() const;
  // Throws std::runtime_error where `usable` is false. To be called before taking the mutex, which
  // a fork may have copied locked.
  void require_usable() const;
  // Held by `run`; whoever owns memory that tasks use takes it to change that memory.
  std::recursive_mutex& mutex() { return mutex_; }

 private:
  // A thread's own share of a phase: neighbouring tasks, which mostly read neighbouring memory.
  // Who has finished takes from the shares of others.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void leave_workers_core() const;
  void share_out(const Phase& phase, Share* shares) const;
  void end_workers();
  void worker(int index, int cpu);
  void work(int index);
  void run_share(const Phase& phase, Share& share, int thread);
  void arrive_and_wait();

  static constexpr int kMaxPhases = 4;
  // Between two layers of one step little more than the attention passes.
  static constexpr std::chrono::microseconds kSpin{100};

  const int threads_;
  const int64_t made_after_;  // so many forks
  int first_cpu_ = 0;
  // Of the first core and of the workers', with SMT siblings: these share a core.
  std::vector<int> first_cpus_;
  std::vector<int> worker_cpus_;
  std::vector<int> node_threads_;
  std::atomic<std::chrono::microseconds> spin_{kSpin};
  std::recursive_mutex mutex_;
  std::vector<std::thread> workers_;

  // The call in progress: written by the caller before `epoch_` changes.
  const Phase* phases_ = nullptr;
  int phase_count_ = 0;
  const void* context_ = nullptr;
  std::array<std::chrono::steady_clock::time_point, kMaxPhases + 1> times_{};
  std::exception_ptr error_;
  std::mutex error_mutex_;

  // Apart from each other, so that a waiting thread's line is not taken by another's counter.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> barrier_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::unique_ptr<Share[]> shares_;  // [kMaxPhases][threads]
  alignas(64) std::atomic<bool> failed_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace moe
