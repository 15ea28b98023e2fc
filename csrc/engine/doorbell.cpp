#include "engine/doorbell.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/lost.h"
#include "engine/pause.h"

namespace moe {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How often the service thread looks when it does not spin. A layer of a step under way may be
// late; but when nothing came for a second no step is under way, and the next one begins with
// `wake`. Measured in a virtual machine of two cores, where a wake-up is dear: 2.8% of a core at
// one look a millisecond, 0.7% at one in ten.
constexpr milliseconds kDoze{1};
constexpr milliseconds kLongDoze{10};
constexpr std::chrono::seconds kLongIdle{1};

// Between two requests the GPU does what it has to alone, and between two steps the serving process
// prepares the next one: the engine's threads watch that long for the next call.
constexpr milliseconds kBetweenRequests{2};

constexpr milliseconds kWatch{100};
// How often requests are refused after a failure.
constexpr milliseconds kRefuse{1};
// How long a failure while nothing was asked is kept back for the layer that asks next: a step that
// was launched gets to its first layer well within it.
constexpr std::chrono::seconds kNaming{1};

constexpr double kLeastSeconds = 1e-3;
constexpr int kMostSeconds = 3600;

constexpr int64_t kNone = -1;

int64_t now_ns() { return nanoseconds(Clock::now().time_since_epoch()).count(); }

nanoseconds from_seconds(double seconds) {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(seconds));
}

// For debuggers, and tools that list threads.
void name_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

void require_tokens(int64_t max_tokens) {
  if (max_tokens < 1) throw std::invalid_argument("a mailbox needs room for at least 1 token");
}

std::string in_seconds(nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

}  // namespace

// What the threads share. The requests and answers are atomics on the board; who swaps a request
// for 0 serves it, and who swaps `serving_` for kNone answers it.
class Doorbell::Service {
 public:
  Service(std::shared_ptr<Engine> engine, std::byte* board, int64_t mailboxes, Settings settings)
      : engine_(std::move(engine)),
        requests_(reinterpret_cast<uint32_t*>(board)),
        mailboxes_(reinterpret_cast<Mailbox*>(board + mailboxes_offset(mailboxes))),
        timeout_(from_seconds(settings.timeout_s)),
        idle_(from_seconds(settings.idle_s)),
        slots_(static_cast<size_t>(mailboxes)) {}

  int64_t add(std::string layer, int64_t max_tokens, Compute compute);
  void begin();
  void end();
  void wake();
  // The threads.
  void serve();
  void watch();
  // Whether the service thread has ended, waiting for it up to `timeout`; if not, that is a
  // failure.
  bool ended();
  // Answers every outstanding request with kFailed; the first one's mailbox, or kNone.
  int64_t refuse();

  bool failed() const { return failed_.load(); }
  std::string error();
  std::vector<Stats> stats() const;

 private:
  struct Slot {
    std::string layer;
    int64_t max_tokens = 0;
    Compute compute;
    // What it has served: see Stats.
    std::atomic<int64_t> requests{0};
    std::atomic<int64_t> tokens{0};
    std::atomic<int64_t> busy_ns{0};
  };

  std::atomic_ref<uint32_t> request(int64_t index) const {
    return std::atomic_ref<uint32_t>(requests_[index]);
  }
  void answer(int64_t index, uint32_t value) {
    std::atomic_ref<uint32_t>(mailboxes_[index].answer).store(value, std::memory_order_release);
  }
  int64_t count() const { return count_.load(std::memory_order_acquire); }
  bool over() const { return stop_.load() || failed_.load(); }

  // The first mailbox from `first` on, in a circle, that has a request; or kNone.
  int64_t find(int64_t first) const;
  // The same, and its request taken; kNone also where another was quicker.
  int64_t take(int64_t first);
  void serve_one(int64_t index);
  // Sleeps for one look.
  void doze(nanoseconds time);
  // A mailbox whose request is not answered, or kNone.
  int64_t outstanding() const;
  void fail(int64_t index, const std::string& cause);
  void fail_locked(int64_t index, const std::string& cause);
  // Of a failure while nothing was asked: the layer that asks first after it.
  void name_locked(int64_t index);

  const std::shared_ptr<Engine> engine_;
  uint32_t* const requests_;
  Mailbox* const mailboxes_;
  const nanoseconds timeout_;
  const nanoseconds idle_;
  std::vector<Slot> slots_;  // the first count_ are in use, and do not change
  std::atomic<int64_t> count_{0};

  std::atomic<int64_t> serving_{kNone};  // the mailbox whose request is being computed
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> woken_{false};
  std::atomic<int64_t> answered_{0};  // of all mailboxes, for the watchdog

  // Guards what follows, and the changes of stop_, failed_ and woken_ that a sleeper waits for.
  std::mutex mutex_;
  std::condition_variable work_;   // for the service thread
  std::condition_variable alarm_;  // for the watchdog, `ended` and `error`
  std::string error_;
  bool is_layer_named_ = false;  // in error_
  bool at_work_ = false;         // the service thread is
};

int64_t Doorbell::Service::add(std::string layer, int64_t max_tokens, Compute compute) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t index = count();
  if (index == static_cast<int64_t>(slots_.size())) {
    throw std::invalid_argument("this doorbell's board has room for " + std::to_string(index) +
                                " mailboxes, and they are taken: make it with more");
  }
  Slot& slot = slots_[static_cast<size_t>(index)];
  slot.layer = std::move(layer);
  slot.max_tokens = max_tokens;
  slot.compute = std::move(compute);
  requests_[index] = kIdle;
  mailboxes_[index] = {};
  count_.store(index + 1, std::memory_order_release);
  return index;
}

void Doorbell::Service::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_.empty()) throw std::runtime_error(error_ + "; make another doorbell");
  stop_.store(false);
}

void Doorbell::Service::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_.store(true);
  work_.notify_all();
  alarm_.notify_all();
}

void Doorbell::Service::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    woken_.store(true);
  }
  work_.notify_one();
}

void Doorbell::Service::serve() {
  // However this thread ends, it says so: unwinding without an exception (pthread_exit) included.
  struct Presence {
    explicit Presence(Service& service) : service(service) {
      const std::lock_guard<std::mutex> lock(service.mutex_);
      service.at_work_ = true;
    }
    ~Presence() {
      const std::lock_guard<std::mutex> lock(service.mutex_);
      service.at_work_ = false;
      if (!service.over()) service.fail_locked(service.outstanding(), "the service thread ended");
      service.alarm_.notify_all();
    }
    Service& service;
  };
  const Presence presence(*this);
  engine_->pool().pin_caller();

  int64_t next = 0;
  Clock::time_point active = Clock::now();
  nanoseconds quiet{0};  // since the last request or `wake`, as far as the clock was read
  for (uint32_t looks = 1; !over(); ++looks) {
    if (const int64_t index = take(next); index != kNone) {
      serve_one(index);
      next = index + 1;
      active = Clock::now();
      quiet = nanoseconds{0};
      continue;
    }
    if (quiet < idle_) {
      pause();
      if (looks % 64 != 0) continue;
    } else {
      doze(quiet < kLongIdle ? kDoze : kLongDoze);
    }
    if (woken_.exchange(false)) active = Clock::now();
    quiet = Clock::now() - active;
  }
}

void Doorbell::Service::serve_one(int64_t index) {
  const int64_t seen = now_ns();
  Slot& slot = slots_[static_cast<size_t>(index)];
  Mailbox& mailbox = mailboxes_[index];
  // Read before the watchdog may answer: the GPU could then be writing its next request.
  const int64_t tokens = mailbox.tokens;
  serving_.store(index);
  try {
    if (tokens < 0 || tokens > slot.max_tokens) {
      throw std::invalid_argument("a request of " + std::to_string(tokens) +
                                  " tokens, and its mailbox was added for 0 to " +
                                  std::to_string(slot.max_tokens));
    }
    if (tokens > 0) slot.compute(tokens);
  } catch (const std::exception& error) {
    fail(index, error.what());
    return;
  }
  if (serving_.exchange(kNone) != index) return;
  const int64_t done = now_ns();
  mailbox.seen_ns = seen;
  mailbox.done_ns = done;
  // Counted first: who has seen the answer finds it counted.
  slot.requests.fetch_add(1, std::memory_order_relaxed);
  slot.tokens.fetch_add(tokens, std::memory_order_relaxed);
  slot.busy_ns.fetch_add(done - seen, std::memory_order_relaxed);
  answered_.fetch_add(1, std::memory_order_relaxed);
  answer(index, kDone);
}

void Doorbell::Service::doze(nanoseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  work_.wait_for(lock, time, [this] { return woken_.load() || over(); });
}

int64_t Doorbell::Service::find(int64_t first) const {
  const int64_t end = count();
  for (int64_t i = first; i < end; ++i) {
    if (request(i).load(std::memory_order_relaxed) != kIdle) return i;
  }
  for (int64_t i = 0; i < std::min(first, end); ++i) {
    if (request(i).load(std::memory_order_relaxed) != kIdle) return i;
  }
  return kNone;
}

int64_t Doorbell::Service::take(int64_t first) {
  const int64_t index = find(first);
  if (index == kNone) return kNone;
  return request(index).exchange(kIdle, std::memory_order_acquire) == kIdle ? kNone : index;
}

int64_t Doorbell::Service::outstanding() const {
  const int64_t serving = serving_.load();
  return serving == kNone ? find(0) : serving;
}

void Doorbell::Service::watch() {
  const nanoseconds period = std::min<nanoseconds>(kWatch, timeout_ / 4);
  nanoseconds stalled{0};
  int64_t answered = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.load()) {
    if (failed_.load()) {
      name_locked(refuse());
      alarm_.wait_for(lock, kRefuse, [this] { return stop_.load(); });
      continue;
    }
    alarm_.wait_for(lock, period, [this] { return over(); });
    const int64_t before = std::exchange(answered, answered_.load(std::memory_order_relaxed));
    const int64_t index = outstanding();
    stalled = index == kNone || answered != before ? nanoseconds{0} : stalled + period;
    if (stalled > timeout_) {
      fail_locked(index, (serving_.load() == index ? "computing it did not end within "
                                                   : "its request was not taken within ") +
                             in_seconds(timeout_));
    }
  }
}

int64_t Doorbell::Service::refuse() {
  int64_t first = kNone;
  const auto fail = [&](int64_t index) {
    answer(index, kFailed);
    if (first == kNone) first = index;
  };
  if (const int64_t serving = serving_.exchange(kNone); serving != kNone) fail(serving);
  for (int64_t i = 0; i < count(); ++i) {
    if (request(i).exchange(kIdle, std::memory_order_acquire) != kIdle) fail(i);
  }
  return first;
}

bool Doorbell::Service::ended() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (alarm_.wait_for(lock, timeout_, [this] { return !at_work_; })) return true;
  fail_locked(serving_.load(),
              "the service thread was told to stop and did not end within " + in_seconds(timeout_));
  return false;
}

void Doorbell::Service::fail(int64_t index, const std::string& cause) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_locked(index, cause);
}

// The first failure is the one to know.
void Doorbell::Service::fail_locked(int64_t index, const std::string& cause) {
  if (!error_.empty()) return;
  const std::string whose = index == kNone ? "" : " of " + slots_[static_cast<size_t>(index)].layer;
  error_ = "the CPU lane" + whose + " failed: " + cause;
  is_layer_named_ = index != kNone;
  failed_.store(true);
  alarm_.notify_all();
}

void Doorbell::Service::name_locked(int64_t index) {
  if (index == kNone || is_layer_named_) return;
  error_ += "; " + slots_[static_cast<size_t>(index)].layer + " was the next to ask";
  is_layer_named_ = true;
  alarm_.notify_all();
}

std::string Doorbell::Service::error() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (error_.empty()) return {};
  alarm_.wait_for(lock, kNaming, [this] { return is_layer_named_ || stop_.load(); });
  return error_;
}

std::vector<Doorbell::Stats> Doorbell::Service::stats() const {
  std::vector<Stats> all;
  for (int64_t i = 0; i < count(); ++i) {
    const Slot& slot = slots_[static_cast<size_t>(i)];
    all.push_back({slot.requests.load(std::memory_order_relaxed),
                   slot.tokens.load(std::memory_order_relaxed),
                   slot.busy_ns.load(std::memory_order_relaxed)});
  }
  return all;
}

Doorbell::Doorbell(std::shared_ptr<Engine> engine, std::byte* board, int64_t mailboxes,
                   Settings settings)
    : engine_(std::move(engine)) {
  if (mailboxes < 1) throw std::invalid_argument("a doorbell needs at least 1 mailbox");
  if (reinterpret_cast<uintptr_t>(board) % kBoardAlign != 0) {
    throw std::invalid_argument("the board's address is not a multiple of " +
                                std::to_string(kBoardAlign) + ": allocate it aligned");
  }
  for (const auto& [name, seconds] :
       {std::pair{"timeout", settings.timeout_s}, std::pair{"idle", settings.idle_s}}) {
    if (seconds >= kLeastSeconds && seconds <= kMostSeconds) continue;
    throw std::invalid_argument("a doorbell's " + std::string(name) + " of " +
                                std::to_string(seconds) + " s was asked for: give 0.001 to " +
                                std::to_string(kMostSeconds) + " s");
  }
  service_ = std::make_shared<Service>(engine_, board, mailboxes, settings);
}

Doorbell::~Doorbell() { stop(); }

int64_t Doorbell::add(std::string layer, std::shared_ptr<const Plan> plan, const Operands& operands,
                      int64_t max_tokens) {
  if (&plan->engine() != engine_.get()) {
    throw std::invalid_argument("the plan of " + layer +
                                " is another engine's: make it with the engine of this doorbell");
  }
  if (operands.top_k < 1 || operands.top_k > plan->top_k()) {
    throw std::invalid_argument("a mailbox of top_k " + std::to_string(operands.top_k) +
                                ", and its plan was made for 1 to " +
                                std::to_string(plan->top_k()) + ": make that with a larger top_k");
  }
  // A thread that stalled may go on while the GPU writes its next request: what it indexes memory
  // by is its own copy.
  require_tokens(max_tokens);
  std::vector<int32_t> ids(static_cast<size_t>(max_tokens * operands.top_k));
  std::vector<int32_t> map(static_cast<size_t>(operands.map_size));
  return add(std::move(layer), max_tokens,
             [plan = std::move(plan), operands, ids = std::move(ids),
              map = std::move(map)](int64_t tokens) mutable {
               std::copy_n(operands.ids, tokens * operands.top_k, ids.begin());
               std::copy_n(operands.map, operands.map_size, map.begin());
               plan->run({.x = operands.x,
                          .out = operands.out,
                          .out_bf16 = false,
                          .accumulate = false,
                          .inner_begin = 0,
                          .inner_end = plan->layer().intermediate},
                         {.ids = ids.data(),
                          .weights = operands.weights,
                          .tokens = tokens,
                          .top_k = operands.top_k,
                          .map = map.data(),
                          .map_size = operands.map_size});
             });
}

int64_t Doorbell::add(std::string layer, int64_t max_tokens, Compute compute) {
  require_tokens(max_tokens);
  return service_->add(std::move(layer), max_tokens, std::move(compute));
}

void Doorbell::start() {
  engine_->pool().require_usable();
  const std::lock_guard<std::mutex> lock(threads_mutex_);
  service_->begin();
  if (server_.joinable()) return;
  engine_->pool().spin_for(kBetweenRequests);
  // The threads own the service, not this: see `stop`.
  watchdog_ = std::thread([service = service_] {
    name_thread("moe-watchdog");
    service->watch();
  });
  try {
    server_ = std::thread([service = service_] {
      name_thread("moe-doorbell");
      service->serve();
    });
  } catch (...) {
    service_->end();
    watchdog_.join();
    throw;
  }
}

void Doorbell::wake() { service_->wake(); }

bool Doorbell::stop() {
  if (!engine_->pool().usable()) {
    forget(watchdog_);
    forget(server_);
    return true;
  }
  const std::lock_guard<std::mutex> lock(threads_mutex_);
  service_->end();
  if (watchdog_.joinable()) watchdog_.join();
  const bool ended = service_->ended();
  if (server_.joinable()) {
    if (ended) {
      server_.join();
    } else {
      server_.detach();
    }
  }
  service_->refuse();
  return ended;
}

bool Doorbell::failed() const { return service_->failed(); }

std::string Doorbell::error() const { return service_->error(); }

std::vector<Doorbell::Stats> Doorbell::stats() const { return service_->stats(); }

}  // namespace moe
