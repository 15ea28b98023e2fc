// The doorbell with threads that play the GPU: several of them at once, faults, and what an idle
// doorbell costs.
#include "engine/doorbell.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>

#include "tests/support.h"

using namespace moe_tests;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr double kTimeout = 0.4;
constexpr uint32_t kNoAnswer = 0;

// A board, seen from the GPU.
class Gpu {
 public:
  explicit Gpu(int64_t mailboxes)
      : board_(static_cast<std::byte*>(std::aligned_alloc(
            moe::kBoardAlign, static_cast<size_t>((moe::board_bytes(mailboxes) + 63) / 64 * 64)))),
        requests_(reinterpret_cast<uint32_t*>(board_)),
        mailboxes_(reinterpret_cast<moe::Mailbox*>(board_ + moe::mailboxes_offset(mailboxes))) {
    if (board_ == nullptr) throw std::bad_alloc();
  }
  ~Gpu() { std::free(board_); }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  std::byte* board() const { return board_; }
  const moe::Mailbox& mailbox(int64_t i) const { return mailboxes_[i]; }

  void ask(int64_t i, int32_t tokens) {
    mailboxes_[i].tokens = tokens;
    answer_of(i).store(kNoAnswer, std::memory_order_relaxed);
    std::atomic_ref<uint32_t>(requests_[i]).store(moe::kAsked, std::memory_order_release);
  }
  uint32_t answer(int64_t i) const { return answer_of(i).load(std::memory_order_acquire); }
  // The answer, or kNoAnswer after five seconds.
  uint32_t wait(int64_t i) const {
    const auto deadline = Clock::now() + std::chrono::seconds(5);
    while (answer(i) == kNoAnswer && Clock::now() < deadline) std::this_thread::yield();
    return answer(i);
  }

 private:
  std::atomic_ref<uint32_t> answer_of(int64_t i) const {
    return std::atomic_ref<uint32_t>(mailboxes_[i].answer);
  }
  std::byte* board_;
  uint32_t* requests_;
  moe::Mailbox* mailboxes_;
};

// Something that a computation waits for.
class Gate {
 public:
  void open() {
    open_ = true;
    open_.notify_all();
  }
  void pass() const { open_.wait(false); }

 private:
  std::atomic<bool> open_{false};
};

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

std::shared_ptr<moe::Engine> engine() { return std::make_shared<moe::Engine>(0, ""); }

void nothing(int64_t) {}

int64_t requests_answered(const moe::Doorbell& doorbell) {
  int64_t sum = 0;
  for (const moe::Doorbell::Stats& stats : doorbell.stats()) sum += stats.requests;
  return sum;
}

// One layer's shard and the memory its requests are in.
struct LaneLayer {
  static constexpr int64_t kTokens = 9, kTopK = 3;

  LaneLayer(std::shared_ptr<moe::Engine> engine, const Case& c, uint32_t seed)
      : shard(c, seed), plan(std::make_shared<moe::Plan>(engine, shard.layer(), kTokens, kTopK)) {
    const auto tokens = static_cast<size_t>(kTokens);
    x.resize(tokens * static_cast<size_t>(c.hidden));
    out.resize(x.size());
    ids.resize(tokens * static_cast<size_t>(kTopK));
    weights.resize(ids.size());
    for (int32_t expert = 0; expert < c.experts; ++expert) map.push_back(expert);
    map.push_back(-1);
  }
  moe::Operands operands() {
    return {x.data(),  ids.data(), weights.data(),
            kTopK,     map.data(), static_cast<int64_t>(map.size()),
            out.data()};
  }

  const Shard shard;
  const std::shared_ptr<moe::Plan> plan;
  std::vector<moe::Bf16> x;
  std::vector<float> weights, out;
  std::vector<int32_t> ids, map;
};

// Two streams ask two layers of their own each, one of them without waiting in between.
void test_requests() {
  const Case cases[] = {{Format::kBf16, 70, 33, 4, 1}, {Format::kInt4, 96, 160, 4, 32}};
  const auto shared = engine();
  Gpu gpu(4);
  std::vector<std::unique_ptr<LaneLayer>> layers;
  moe::Doorbell doorbell(shared, gpu.board(), 4, {});
  for (uint32_t i = 0; i < 4; ++i) {
    layers.push_back(std::make_unique<LaneLayer>(shared, cases[i % 2], i));
    expect(doorbell.add("layer", layers[i]->plan, layers[i]->operands(), LaneLayer::kTokens) == i,
           "mailboxes are counted");
  }
  doorbell.start();
  const auto stream = [&](int64_t first, uint32_t seed, bool both) {
    std::mt19937 random(seed);
    const auto ask = [&](int64_t i) {
      LaneLayer& layer = *layers[static_cast<size_t>(i)];
      Batch batch(layer.shard.layer(), 1 + random() % LaneLayer::kTokens, LaneLayer::kTopK,
                  random());
      std::copy(batch.x.begin(), batch.x.end(), layer.x.begin());
      std::copy(batch.ids.begin(), batch.ids.end(), layer.ids.begin());
      std::copy(batch.weights.begin(), batch.weights.end(), layer.weights.begin());
      gpu.ask(i, static_cast<int32_t>(batch.tokens));
      return batch;
    };
    const auto check = [&](int64_t i, const Batch& batch) {
      LaneLayer& layer = *layers[static_cast<size_t>(i)];
      expect(gpu.wait(i) == moe::kDone, "answered");
      const std::vector<float> expected = run(*layer.plan, batch);
      expect(std::equal(expected.begin(), expected.end(), layer.out.begin()), "the plan's output");
      expect(gpu.mailbox(i).seen_ns > 0 && gpu.mailbox(i).done_ns >= gpu.mailbox(i).seen_ns,
             "timestamps");
    };
    for (int n = 0; n < 300; ++n) {
      const Batch batch = ask(first);
      if (!both) check(first, batch);
      const Batch other = ask(first + 1);
      if (both) check(first, batch);
      check(first + 1, other);
    }
  };
  std::thread second(stream, 2, 1, true);
  stream(0, 2, false);
  second.join();
  expect(doorbell.error().empty(), "no error");
  for (const moe::Doorbell::Stats& stats : doorbell.stats()) {
    expect(stats.requests == 300, "requests are counted, by mailbox");
    expect(stats.tokens > 300 && stats.busy_ns > 0, "and so are tokens and time");
  }
}

// What holds after any failure: all answered, now and later, and the error names layer and cause.
void expect_failed(moe::Doorbell& doorbell, Gpu& gpu, const char* layer, const char* cause) {
  for (int64_t i = 0; i < 3; ++i) expect(gpu.wait(i) == moe::kFailed, cause);
  for (int n = 0; n < 3; ++n) {
    for (int64_t i = 0; i < 3; ++i) gpu.ask(i, 1);
    for (int64_t i = 0; i < 3; ++i) expect(gpu.wait(i) == moe::kFailed, cause);
  }
  expect(contains(doorbell.error(), layer), layer);
  expect(contains(doorbell.error(), cause), cause);
  bool thrown = false;
  doorbell.stop();
  try {
    doorbell.start();
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  expect(thrown, "a failed doorbell does not start");
}

// Three mailboxes ask; the first one's computation, of `tokens`, fails.
void test_fault(const char* cause, int32_t tokens, const moe::Doorbell::Compute& compute) {
  Gpu gpu(3);
  moe::Doorbell doorbell(engine(), gpu.board(), 3, {.timeout_s = kTimeout});
  doorbell.add("layers.0", 4, compute);
  doorbell.add("layers.1", 4, nothing);
  doorbell.add("layers.2", 4, nothing);
  doorbell.start();
  gpu.ask(1, 2);
  expect(gpu.wait(1) == moe::kDone, "answered before the fault");
  gpu.ask(0, tokens);
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  while (doorbell.error().empty() && Clock::now() < deadline) std::this_thread::yield();
  gpu.ask(1, 1);
  gpu.ask(2, 1);
  expect_failed(doorbell, gpu, "layers.0", cause);
}

// For longer than the timeout something is outstanding, and answered.
void test_busy() {
  Gpu gpu(3);
  moe::Doorbell doorbell(engine(), gpu.board(), 3, {.timeout_s = kTimeout});
  for (int64_t i = 0; i < 3; ++i) {
    doorbell.add("layers." + std::to_string(i), 4,
                 [](int64_t) { std::this_thread::sleep_for(milliseconds(100)); });
  }
  doorbell.start();
  for (int64_t i = 0; i < 3; ++i) gpu.ask(i, 1);
  for (int n = 0; n < 4; ++n) {
    for (int64_t i = 0; i < 3; ++i) {
      expect(gpu.wait(i) == moe::kDone, "answered while busy");
      gpu.ask(i, 1);
    }
  }
  expect(doorbell.error().empty(), "busy is not stalled");
}

void test_bad_row() {
  const Case c{Format::kBf16, 70, 33, 4, 1};
  const auto shared = engine();
  LaneLayer layer(shared, c, 1);
  layer.map[2] = 1000;
  layer.ids[0] = 2;
  Gpu gpu(3);
  moe::Doorbell doorbell(shared, gpu.board(), 3, {.timeout_s = kTimeout});
  doorbell.add("layers.0", layer.plan, layer.operands(), LaneLayer::kTokens);
  doorbell.add("layers.1", 4, nothing);
  doorbell.add("layers.2", 4, nothing);
  doorbell.start();
  for (int64_t i : {1, 2}) gpu.ask(i, 1);
  for (int64_t i : {1, 2}) expect(gpu.wait(i) == moe::kDone, "answered before the fault");
  gpu.ask(0, 1);
  for (int64_t i : {1, 2}) gpu.ask(i, 1);
  expect(gpu.wait(0) == moe::kFailed, "a row out of range");
  for (int64_t i : {1, 2}) {
    gpu.wait(i);
    gpu.ask(i, 1);
  }
  expect_failed(doorbell, gpu, "layers.0", "expert_map[2] is 1000");
}

// The answer of a thread that stalled and went on is not mistaken for that of a later request.
void test_late_answer() {
  Gate gate;
  Gpu gpu(1);
  moe::Doorbell doorbell(engine(), gpu.board(), 1, {.timeout_s = kTimeout});
  doorbell.add("layers.0", 1, [&](int64_t) { gate.pass(); });
  doorbell.start();
  gpu.ask(0, 1);
  expect(gpu.wait(0) == moe::kFailed, "a stalled request");
  gate.open();
  for (int n = 0; n < 100; ++n) {
    gpu.ask(0, 1);
    expect(gpu.wait(0) == moe::kFailed, "a late answer");
  }
  expect(requests_answered(doorbell) == 0, "a late answer is not counted");
}

// As a GPU that has been told of a failure writes: nothing orders it with the thread that stalled.
__attribute__((no_sanitize("thread"))) void overwrite(std::vector<int32_t>& list) {
  for (size_t i = 0; i < list.size(); ++i) list.data()[i] = 1 << 30;
}

// A request whose computation began late is computed as it was asked, whatever the GPU, which has
// been told of the failure, has written since.
void test_late_routing() {
  const auto shared = engine();
  const Case c{Format::kBf16, 70, 33, 4, 1};
  LaneLayer layer(shared, c, 1);
  const Batch batch(layer.shard.layer(), LaneLayer::kTokens, LaneLayer::kTopK, 1);
  const std::vector<float> expected = run(*layer.plan, batch);
  std::copy(batch.x.begin(), batch.x.end(), layer.x.begin());
  std::copy(batch.ids.begin(), batch.ids.end(), layer.ids.begin());
  std::copy(batch.weights.begin(), batch.weights.end(), layer.weights.begin());
  Gpu gpu(1);
  moe::Doorbell doorbell(shared, gpu.board(), 1, {.timeout_s = kTimeout});
  doorbell.add("layers.0", layer.plan, layer.operands(), LaneLayer::kTokens);
  doorbell.start();
  {
    const std::lock_guard<std::recursive_mutex> busy(shared->pool().mutex());
    gpu.ask(0, LaneLayer::kTokens);
    expect(gpu.wait(0) == moe::kFailed, "a request that the engine has no time for");
    overwrite(layer.ids);
    overwrite(layer.map);
  }
  expect(doorbell.stop(), "it went on");
  expect(expected == layer.out, "with its own routing");
}

void test_stop() {
  Gpu gpu(2);
  Gate gate;
  std::atomic<int> begun{0};
  moe::Doorbell doorbell(engine(), gpu.board(), 2, {});
  doorbell.add("layers.0", 1, [&](int64_t) {
    ++begun;
    gate.pass();
  });
  doorbell.add("layers.1", 1, nothing);
  gpu.ask(1, 1);
  expect(doorbell.stop(), "stopped before it started");
  expect(gpu.answer(1) == moe::kFailed, "refused by stop");
  doorbell.start();
  doorbell.start();
  gpu.ask(0, 1);
  while (begun == 0) std::this_thread::yield();
  gpu.ask(1, 1);
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(50));
    gate.open();
  });
  expect(doorbell.stop(), "the request under way is finished");
  opener.join();
  expect(gpu.answer(0) == moe::kDone && gpu.answer(1) == moe::kFailed, "the others are refused");
  doorbell.start();
  gpu.ask(1, 1);
  expect(gpu.wait(1) == moe::kDone, "started again");
  expect(doorbell.error().empty(), "stopping is no error");
}

void test_stop_stalled() {
  Gpu gpu(2);
  Gate gate;
  std::atomic<bool> left{false};
  {
    moe::Doorbell doorbell(engine(), gpu.board(), 2, {.timeout_s = kTimeout});
    doorbell.add("layers.0", 1, [&](int64_t) {
      gate.pass();
      left = true;
    });
    doorbell.add("layers.1", 1, nothing);
    doorbell.start();
    gpu.ask(0, 1);
    gpu.ask(1, 1);
    while (gpu.answer(1) == kNoAnswer && requests_answered(doorbell) == 0) {
      std::this_thread::yield();
    }
    expect(!doorbell.stop(), "a stalled thread is left to itself");
    expect(gpu.answer(0) == moe::kFailed, "its request is refused");
  }
  gate.open();
  while (!left) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(50));
  expect(gpu.answer(0) == moe::kFailed, "and not answered later");
}

// A request that nobody announced is seen; one after a pause too; waiting costs next to nothing.
void test_idle() {
  Gpu gpu(1);
  moe::Doorbell doorbell(engine(), gpu.board(), 1, {});
  doorbell.add("layers.0", 1, nothing);
  doorbell.start();
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  const auto cpu = [&] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
  };
  for (const int pause : {100, 1500}) {
    std::this_thread::sleep_for(milliseconds(pause));
    const auto begin = Clock::now();
    gpu.ask(0, 1);
    expect(gpu.wait(0) == moe::kDone, "seen without a wake");
    const std::chrono::duration<double, std::milli> took = Clock::now() - begin;
    std::printf("a request without wake, %d ms after the last: %.2f ms\n", pause, took.count());
    expect(took < milliseconds(100), "seen soon without a wake");
  }
  std::this_thread::sleep_for(milliseconds(1200));
  const double before = cpu();
  std::this_thread::sleep_for(milliseconds(2000));
  const double used = (cpu() - before) / 2;
  std::printf("idle: %.2f%% of a core\n", used * 100);
  expect(used < 0.02, "an idle doorbell");
}

void test_round_trip() {
  constexpr int64_t kMailboxes = 48;
  Gpu gpu(kMailboxes);
  moe::Doorbell doorbell(engine(), gpu.board(), kMailboxes, {});
  for (int64_t i = 0; i < kMailboxes; ++i) doorbell.add("layer", 1, nothing);
  doorbell.start();
  std::vector<double> us;
  for (int n = 0; n < 200; ++n) {
    doorbell.wake();
    for (int64_t i = 0; i < kMailboxes; ++i) {
      const auto begin = Clock::now();
      gpu.ask(i, 1);
      while (gpu.answer(i) == kNoAnswer) {
      }
      us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    }
  }
  std::sort(us.begin(), us.end());
  std::printf("round trip of %ld mailboxes: median %.2f us, 99th percentile %.2f us\n",
              static_cast<long>(kMailboxes), us[us.size() / 2], us[us.size() * 99 / 100]);
}

void test_refusals() {
  Gpu gpu(1);
  const auto refused = [](const std::function<void()>& action) {
    try {
      action();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  const auto shared = engine();
  expect(refused([&] { moe::Doorbell(shared, gpu.board() + 4, 1, {}); }), "an unaligned board");
  expect(refused([&] { moe::Doorbell(shared, gpu.board(), 0, {}); }), "no mailbox");
  expect(refused([&] { moe::Doorbell(shared, gpu.board(), 1, {.timeout_s = 0}); }), "no timeout");
  LaneLayer layer(shared, {Format::kBf16, 70, 33, 4, 1}, 1);
  moe::Doorbell doorbell(shared, gpu.board(), 1, {});
  moe::Operands operands = layer.operands();
  operands.top_k = LaneLayer::kTopK + 1;
  expect(refused([&] { doorbell.add("a", layer.plan, operands, 1); }), "a top_k too large");
  expect(refused([&] { doorbell.add("a", 0, nothing); }), "no tokens");
  doorbell.add("a", 1, nothing);
  expect(refused([&] { doorbell.add("b", 1, nothing); }), "a full board");
}

}  // namespace

void moe_tests::test_doorbell() {
  test_refusals();
  test_requests();
  test_fault("it is told to", 1, [](int64_t) { throw std::runtime_error("it is told to"); });
  test_fault("a request of 5 tokens", 5, nothing);
  test_fault("the service thread ended", 1, [](int64_t) { pthread_exit(nullptr); });
  Gate gate;
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(1500));
    gate.open();
  });
  test_fault("did not end within 0.4 s", 1, [&](int64_t) { gate.pass(); });
  opener.join();
  test_busy();
  test_bad_row();
  test_late_answer();
  test_late_routing();
  test_stop();
  test_stop_stalled();
  test_idle();
  test_round_trip();
}
