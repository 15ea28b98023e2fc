#include "engine/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <string>

#include "engine/lost.h"
#include "engine/wait.h"

namespace moe {
namespace {

std::atomic<int64_t> forks{0};

// How many forks lie between this process and the one that asked first. Unlike asking for the
// process's number, no system call: those are dear in some sandboxes, and each call of a pool asks.
int64_t fork_count() {
  static const int failed = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  if (failed != 0) throw std::bad_alloc();
  return forks.load(std::memory_order_relaxed);
}

// The pool to whose first core this thread is pinned.
thread_local const Pool* pinned_by = nullptr;

// Lets the calling thread run on these CPUs, ascending. Without the right to (a cpuset changed
// meanwhile) it runs where the kernel puts it.
void run_on(const std::vector<int>& cpus) {
  const auto capacity = static_cast<size_t>(cpus.back()) + 1;
  cpu_set_t* mask = CPU_ALLOC(capacity);
  if (mask == nullptr) return;
  const size_t bytes = CPU_ALLOC_SIZE(capacity);
  CPU_ZERO_S(bytes, mask);
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, mask);
  pthread_setaffinity_np(pthread_self(), bytes, mask);
  CPU_FREE(mask);
}

bool has(const std::vector<int>& cpus, int cpu) {
  return std::find(cpus.begin(), cpus.end(), cpu) != cpus.end();
}

}  // namespace

Pool::Pool(const std::vector<Core>& cores, int threads)
    : threads_(threads), made_after_(fork_count()) {
  if (threads < 1 || threads > static_cast<int>(cores.size())) {
    const std::string most = std::to_string(cores.size());
    const bool is_one = cores.size() == 1;
    throw std::invalid_argument("an engine of " + std::to_string(threads) +
                                " threads was asked for, and this process may use " + most +
                                " physical core" + (is_one ? "" : "s") + ": ask for " +
                                (is_one ? "" : "1 to ") + most +
                                ", or widen the process's CPU affinity");
  }
  for (int i = 0; i < threads; ++i) {
    const bool same =
        i > 0 && cores[static_cast<size_t>(i)].node == cores[static_cast<size_t>(i) - 1].node;
    if (!same) node_threads_.push_back(0);
    ++node_threads_.back();
  }
  first_cpu_ = cores.front().cpu;
  first_cpus_ = cores.front().siblings;
  shares_ = std::make_unique<Share[]>(static_cast<size_t>(kMaxPhases * threads));
  for (int i = 1; i < threads; ++i) {
    const std::vector<int>& siblings = cores[static_cast<size_t>(i)].siblings;
    worker_cpus_.insert(worker_cpus_.end(), siblings.begin(), siblings.end());
  }
  workers_.reserve(static_cast<size_t>(threads) - 1);
  try {
    for (int i = 1; i < threads; ++i) {
      workers_.emplace_back([this, i, cpu = cores[static_cast<size_t>(i)].cpu] { worker(i, cpu); });
    }
  } catch (const std::exception& error) {
    // Those that run would otherwise end the process, being neither joined nor detached.
    end_workers();
    throw std::runtime_error("an engine of " + std::to_string(threads) +
                             " threads was asked for, and the operating system let " +
                             std::to_string(workers_.size()) +
                             " of them start beside the caller (" + error.what() +
                             "): raise the limit on processes or memory, or ask for fewer");
  }
}

Pool::~Pool() {
  if (!usable()) {
    for (std::thread& thread : workers_) forget(thread);
    return;
  }
  end_workers();
}

void Pool::end_workers() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

bool Pool::usable() const { return fork_count() == made_after_; }

void Pool::require_usable() const {
  if (!usable()) {
    throw std::runtime_error(
        "this CPU expert engine was made in another process and its threads did not follow the "
        "fork: make an engine in this process, or start it with the spawn method");
  }
}

void Pool::spin_for(std::chrono::microseconds spin) {
  spin_.store(spin, std::memory_order_relaxed);
}

void Pool::pin_caller() const {
  run_on({first_cpu_});
  pinned_by = this;
}

// Moved and let free again, a thread stays where it is until it has a reason to leave, so this is
// done once in a while.
void Pool::leave_workers_core() const {
  if (pinned_by == this || !has(worker_cpus_, sched_getcpu())) return;
  const std::vector<int> allowed = callers_cpus();
  if (!has(allowed, first_cpu_)) return;
  run_on({first_cpu_});
  run_on(allowed);
}

void Pool::leave_cores() const {
  const auto is_ours = [this](int cpu) { return has(first_cpus_, cpu) || has(worker_cpus_, cpu); };
  if (!is_ours(sched_getcpu())) return;
  const std::vector<int> allowed = callers_cpus();
  std::vector<int> others;
  for (const int cpu : allowed) {
    if (!is_ours(cpu)) others.push_back(cpu);
  }
  if (others.empty()) return;
  run_on(others);
  run_on(allowed);
}

void Pool::run(const Phase* phases, int count, const void* context) {
  require_usable();
  if (count > kMaxPhases) throw std::logic_error("too many phases for one run of the pool");
  if (count == 0) return;
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  leave_workers_core();
  phases_ = phases;
  phase_count_ = count;
  context_ = context;
  error_ = nullptr;
  failed_.store(false, std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) share_out(phases[i], &shares_[static_cast<size_t>(i * threads_)]);
  times_[0] = std::chrono::steady_clock::now();
  if (threads_ > 1) {
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }
  work(0);
  if (error_) std::rethrow_exception(error_);
}

void Pool::share_out(const Phase& phase, Share* shares) const {
  const auto fill = [&](int first_thread, int threads, int64_t begin, int64_t end) {
    for (int t = 0; t < threads; ++t) {
      Share& share = shares[first_thread + t];
      share.next.store(begin + (end - begin) * t / threads, std::memory_order_relaxed);
      share.end = begin + (end - begin) * (t + 1) / threads;
    }
  };
  if (phase.node_ends == nullptr) return fill(0, threads_, 0, phase.count);
  int thread = 0;
  for (size_t node = 0; node < node_threads_.size(); ++node) {
    const int64_t begin = node == 0 ? 0 : phase.node_ends[node - 1];
    fill(thread, node_threads_[node], begin, phase.node_ends[node]);
    thread += node_threads_[node];
  }
}

void Pool::worker(int index, int cpu) {
  run_on({cpu});
  uint32_t seen = 0;
  while (true) {
    wait_for_change(epoch_, seen, spin());
    if (stop_.load(std::memory_order_relaxed)) return;
    ++seen;
    work(index);
  }
}

void Pool::work(int index) {
  // Copies: once the last barrier opens, the caller may already be writing the next call.
  const Phase* const phases = phases_;
  const int count = phase_count_;
  for (int i = 0; i < count; ++i) {
    for (int t = 0; t < threads_; ++t) {
      run_share(phases[i], shares_[static_cast<size_t>(i * threads_ + (index + t) % threads_)],
                index);
    }
    arrive_and_wait();
    if (index == 0) times_[static_cast<size_t>(i) + 1] = std::chrono::steady_clock::now();
  }
}

void Pool::run_share(const Phase& phase, Share& share, int thread) {
  while (!failed_.load(std::memory_order_relaxed)) {
    // Looking first keeps a finished share's line shared between the threads that look.
    if (share.next.load(std::memory_order_relaxed) >= share.end) return;
    const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= share.end) return;
    try {
      phase.run(context_, task, thread);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
      failed_.store(true, std::memory_order_relaxed);
    }
  }
}

void Pool::arrive_and_wait() {
  if (threads_ == 1) return;
  const uint32_t seen = barrier_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_.fetch_add(1, std::memory_order_release);
    barrier_.notify_all();
  } else {
    wait_for_change(barrier_, seen, kSpin);
  }
}

}  // namespace moe
