// The engine without Python, to be run under sanitizers: every instruction set against the scalar
// one, weights and operands that end where a page does (reading on is a fault), two callers at
// once, errors; the doorbell (doorbell_test.cpp), and fp16 products (fp16_test.cpp).
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/doorbell.h"
#include "engine/plan.h"
#include "engine/runner.h"
#include "engine/topology.h"
#include "tests/support.h"

namespace {

using namespace moe_tests;

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / (norm > 0 ? norm : 1));
}

void test_sets_agree(const Case& c) {
  const Shard shard(c, 1);
  const auto scalar = std::make_shared<moe::Engine>(1, "scalar");
  for (const int64_t tokens : {1, 3, 7, 40, 70}) {
    const Batch batch(shard.layer(), tokens, 3, static_cast<uint32_t>(tokens));
    const auto expected = run(moe::Plan(scalar, shard.layer(), 32, 3), batch);
    for (const moe::Isa& isa : moe::available_isas()) {
      for (const int threads : {1, 0}) {
        const auto engine = std::make_shared<moe::Engine>(threads, isa.name);
        const moe::Plan plan(engine, shard.layer(), 32, 3);
        expect(relative_error(run(plan, batch), expected) < 5e-3, isa.name);
      }
    }
  }
}

// Cores said to be on nodes of their own, and more than there may be: other shares, the same sums.
void test_nodes(const Case& c) {
  const Shard shard(c, 4);
  std::vector<moe::Core> cores = moe::physical_cores();
  const auto flat = std::make_shared<moe::Engine>(1, "");
  while (cores.size() < 5) cores.push_back(cores.front());
  for (size_t i = 0; i < cores.size(); ++i) cores[i].node = static_cast<int>(i / 2);
  const auto pool = std::make_shared<moe::Pool>(cores, static_cast<int>(cores.size()));
  const auto split = std::make_shared<moe::Engine>(pool, "");
  for (const int64_t tokens : {1, 9, 50}) {
    const Batch batch(shard.layer(), tokens, 3, static_cast<uint32_t>(tokens));
    const auto expected = run(moe::Plan(flat, shard.layer(), 64, 3), batch);
    expect(run(moe::Plan(split, shard.layer(), 64, 3), batch) == expected, "nodes");
  }
}

void pin_to(const std::vector<int>& cpus) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &mask);
  expect(sched_setaffinity(0, sizeof(mask), &mask) == 0, "affinity");
}

void test_two_callers(const Case& c) {
  const Shard shard(c, 2);
  const auto engine = std::make_shared<moe::Engine>(0, "");
  const auto call = [&](uint32_t seed) {
    const moe::Plan plan(engine, shard.layer(), 8, 2);
    const Batch batch(shard.layer(), 5 + seed, 2, seed);
    const auto first = run(plan, batch);
    for (int i = 0; i < 100; ++i) expect(run(plan, batch) == first, "two callers");
  };
  std::thread other(call, 1);
  call(2);
  other.join();
}

void test_errors(const Case& c) {
  const Shard shard(c, 3);
  const moe::Plan plan(std::make_shared<moe::Engine>(0, ""), shard.layer(), 8, 2);
  Batch batch(shard.layer(), 4, 2, 3);
  batch.ids[5] = static_cast<int32_t>(c.experts);
  bool thrown = false;
  try {
    run(plan, batch);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  expect(thrown, "an id out of range");

  moe::Pool pool(moe::physical_cores(), static_cast<int>(moe::physical_cores().size()));
  const moe::Phase phases[] = {{50,
                                [](const void*, int64_t task, int) {
                                  if (task == 7) throw std::runtime_error("7");
                                }},
                               {50, [](const void*, int64_t, int) {}}};
  for (int i = 0; i < 200; ++i) {
    thrown = false;
    try {
      pool.run(phases, 2, nullptr);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    expect(thrown, "a task's exception");
  }
}

// What a container's cgroup says, of either version.
void test_quota() {
  char root[] = "/tmp/moe-cgroup-XXXXXX";
  if (mkdtemp(root) == nullptr) return expect(false, "a folder");
  const std::string folder = root;
  const auto write = [](const std::string& path, const char* text) {
    FILE* const file = std::fopen(path.c_str(), "w");
    if (file == nullptr) return expect(false, "a file");
    std::fputs(text, file);
    std::fclose(file);
  };
  expect(moe::cpu_quota(folder) > 1e6, "no cgroup, no limit");
  mkdir((folder + "/cpu").c_str(), 0700);
  write(folder + "/cpu/cpu.cfs_period_us", "100000\n");
  write(folder + "/cpu/cpu.cfs_quota_us", "-1\n");
  expect(moe::cpu_quota(folder) > 1e6, "version 1 without a limit");
  write(folder + "/cpu/cpu.cfs_quota_us", "250000\n");
  expect(moe::cpu_quota(folder) == 2.5, "version 1");
  write(folder + "/cpu.max", "max 100000\n");
  expect(moe::cpu_quota(folder) > 1e6, "version 2 without a limit");
  write(folder + "/cpu.max", "800000 100000\n");
  expect(moe::cpu_quota(folder) == 8, "version 2");
  for (const char* name : {"/cpu/cpu.cfs_period_us", "/cpu/cpu.cfs_quota_us", "/cpu.max"}) {
    std::remove((folder + name).c_str());
  }
  std::remove((folder + "/cpu").c_str());
  std::remove(root);
}

// A thread that has started a call is not where the pool's threads are. What the kernel does with
// it afterwards is its own affair, hence the second and third look.
void test_leaving() {
  const std::vector<moe::Core> cores = moe::physical_cores();
  const std::vector<int> before = moe::callers_cpus();
  if (before.size() < 2) return;
  const auto leaves = [&before](const moe::Pool& pool, int cpu) {
    bool left = false;
    for (int i = 0; i < 3 && !left; ++i) {
      pin_to({cpu});
      pin_to(before);
      pool.leave_cores();
      left = sched_getcpu() != cpu;
    }
    return left;
  };
  expect(leaves(moe::Pool(cores, 1), cores.front().cpu), "the pool's core is left");
  expect(moe::callers_cpus() == before, "a thread that left may run where it might before");
  const moe::Core shared{.cpu = before.front(), .node = 0, .siblings = {before.back()}};
  expect(leaves(moe::Pool({shared}, 1), before.back()), "a sibling of the pool's core is left");

  // Nowhere to go.
  const moe::Pool all(cores, static_cast<int>(cores.size()));
  all.leave_cores();
  expect(moe::callers_cpus() == before, "a pool of every core");
}

// Calls of a runner come in the order in which they were given, one at a time, and end before it.
void test_runner() {
  const moe::Pool pool(moe::physical_cores(), 1);
  std::vector<int> order;
  std::vector<std::shared_future<double>> results;
  {
    moe::Runner runner(pool);
    for (int i = 0; i < 100; ++i) {
      results.push_back(runner.run([i, &order] {
        order.push_back(i);
        if (i % 10 == 3) throw std::runtime_error("the third");
        return static_cast<double>(i);
      }));
      // Sometimes it has gone to sleep by then.
      if (i % 25 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  expect(order.size() == 100 && std::is_sorted(order.begin(), order.end()), "every call, in order");
  for (int i = 0; i < 100; ++i) {
    bool threw = false;
    double value = -1;
    try {
      value = results[static_cast<size_t>(i)].get();
    } catch (const std::runtime_error&) {
      threw = true;
    }
    expect(i % 10 == 3 ? threw : value == i, "what a call returns or throws");
  }
  const moe::Runner idle(pool);  // ends without a call
  moe::Runner asleep(pool);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  expect(asleep.run([] { return 7.0; }).wait_for(std::chrono::seconds(20)) ==
             std::future_status::ready,
         "a runner that sleeps is woken");
}

// A process forked from one with a runner has none: it says so, and does not wait for it.
void test_runner_and_fork() {
  const int threads = moe::physical_cores().size() < 2 ? 1 : 2;
  auto engine = std::make_unique<moe::Engine>(threads, "");
  engine->runner().run([] { return 0.0; }).wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    bool refused = false;
    try {
      engine->runner();
    } catch (const std::runtime_error&) {
      refused = true;
    }
#if !defined(__SANITIZE_THREAD__)  // which lets no thread start behind a fork
    // Its own threads have the parent's numbers.
    auto mine = std::make_unique<moe::Engine>(threads, "");
    mine->runner().run([] { return 0.0; }).wait();
    engine.reset();
    mine->runner().run([] { return 0.0; }).wait();
    mine.reset();
#endif
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  expect(waitpid(child, &status, 0) == child && status == 0, "a runner after a fork");
}

// Whether `body` returns true in a process with address space for so many stacks of threads more.
bool holds_with_stacks(size_t stacks, const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    long pages = 0;
    FILE* const statm = std::fopen("/proc/self/statm", "r");
    const bool known = statm != nullptr && std::fscanf(statm, "%ld", &pages) == 1;
    if (statm != nullptr) std::fclose(statm);
    pthread_attr_t attributes;
    size_t stack = 0;
    pthread_getattr_default_np(&attributes);
    pthread_attr_getstacksize(&attributes, &stack);
    rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur =
        static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + stacks * stack + stack / 2;
    setrlimit(RLIMIT_AS, &limit);
    _exit(known && body() ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

// Threads that the operating system does not let start are an error, not the process's end. To be
// asked before this process has had threads, whose stacks would be used again.
void test_threads_that_cannot_start() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which want much memory
  const auto throws = [](const auto& start) {
    try {
      start();
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  const std::vector<moe::Core> cores(64, moe::physical_cores().front());
  const auto pool = [&] { return throws([&] { moe::Pool(cores, 64); }); };
  expect(holds_with_stacks(3, pool), "a pool whose threads cannot start");

  const auto doorbell = [&] {
    alignas(moe::kBoardAlign) std::byte board[moe::board_bytes(1)] = {};
    moe::Doorbell bell(std::make_shared<moe::Engine>(1, ""), board, 1, {});
    if (!throws([&] { bell.start(); })) return false;
    rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_AS, &limit);
    bell.start();
    return bell.stop();
  };
  expect(holds_with_stacks(1, doorbell), "a doorbell whose second thread cannot start");
#endif
}

}  // namespace

int main() {
  test_threads_that_cannot_start();
  const Case cases[] = {{Format::kBf16, 70, 33, 4, 1},
                        {Format::kBf16, 128, 64, 4, 1},
                        {Format::kFp8, 150, 77, 4, 128},
                        {Format::kInt4, 96, 160, 4, 32},
                        {Format::kInt4, 384, 256, 4, 128},
                        {Format::kMxfp4, 224, 96, 4, 32},
                        {Format::kFp8, 2120, 40, 2, 128},
                        // Tails: of groups, and where there are none of columns and rows.
                        {Format::kNvfp4, 144, 176, 4, 16},
                        {Format::kInt8, 150, 77, 4, 1024},
                        {Format::kInt4, 192, 64, 4, 64},
                        {Format::kInt4, 160, 96, 4, 32, true},
                        {Format::kInt4, 192, 320, 4, 64, true}};
  for (const Case& c : cases) test_sets_agree(c);
  for (const Case& c : cases) test_nodes(c);
  test_two_callers(cases[0]);
  test_errors(cases[0]);
  test_quota();
  test_leaving();
  test_runner();
  test_runner_and_fork();
  test_fp16();
  test_doorbell();
  std::printf(failures == 0 ? "ok\n" : "%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
