// The doorbell: how a GPU asks for a layer's experts from inside a captured graph, and how the CPU
// answers. There is no CUDA here: the memory is the caller's, mapped and pinned where a GPU uses
// it. The GPU's side is device/request.py, which takes the offsets from here through the binding.
//
// LAYOUT. One board, at a 64-byte boundary, for up to M mailboxes; offsets in bytes:
//
//   4 i                             uint32 request of mailbox i: 0 idle, 1 asked. Packed: looking
//                                   at all of them touches a cache line for each 16
//   mailboxes_offset(M) + 128 i     struct Mailbox of mailbox i
//
// with mailboxes_offset(M) = 4 M rounded up to 64. The operands (x, ids, weights, map, out) lie
// where the caller put them; their addresses, top_k and the most tokens are fixed when the mailbox
// is added. Mailboxes that are never outstanding together may share operands. A mailbox is for one
// layer and one stream of requests: one for all batch sizes is enough where these do not overlap.
//
// ORDERING. In a mailbox one request is outstanding at a time; between mailboxes there is no order.
//
//   GPU  writes the operands and `tokens`, and answer = 0;
//        fences with system scope (__threadfence_system() by every thread that wrote, and then a
//        barrier if they are several; fence.acq_rel.sys);
//        one thread writes request = 1.
//   CPU  swaps the request for 0 (acquire); computes; writes out, seen_ns, done_ns;
//        writes answer (release).
//   GPU  behind all that in stream order, waits until answer >= 1 (cuStreamWaitValue32 with
//        CU_STREAM_WAIT_VALUE_GEQ), then reads `out`. Only then may it ask again.
//
// A graph's step that has nothing to ask waits too: the GPU writes answer = 1 itself then, and
// nothing else.
//
// The GPU never writes 0 to a request, and the CPU never 0 to an answer.
//
// FAILURE. A doorbell has failed, for good, when
//   - computing a request threw, or its tokens were out of range;
//   - its service thread has ended;
//   - nothing was answered for `timeout` while requests were outstanding: the watchdog looks ten
//     times a second, and counts its looks instead of reading a clock, so that a process that was
//     stopped and continued has not failed.
// From then on `error` names the layer and the cause (after an end while nothing was asked the
// layer that asks next, for which it waits up to a second), and the watchdog answers every
// outstanding and every later request with 2, within some milliseconds, until `stop`: no stream
// waits for ever, and nothing is computed. `out` holds nothing of use after a 2. A request is
// answered once: the answer that a stalled thread has ready too late is dropped, and what it
// indexes memory by is a copy of the request's ids and map, which the GPU may be writing anew. Who
// launches the graphs checks `error` before it uses what they computed: a kernel may, but need not,
// look at the answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/plan.h"

namespace moe {

inline constexpr size_t kBoardAlign = 64;

inline constexpr uint32_t kIdle = 0;
inline constexpr uint32_t kAsked = 1;

inline constexpr uint32_t kDone = 1;
inline constexpr uint32_t kFailed = 2;

struct alignas(kBoardAlign) Mailbox {
  // The GPU's line.
  int32_t tokens;  // rows of this request, 0 to the mailbox's most; 0 is answered at once
  // The CPU's line, apart from the GPU's.
  alignas(kBoardAlign) uint32_t answer;  // 0, kDone or kFailed
  int64_t seen_ns;  // CLOCK_MONOTONIC when the request was taken and when it was done, in
  int64_t done_ns;  // nanoseconds; written with kDone
};
static_assert(offsetof(Mailbox, tokens) == 0 && offsetof(Mailbox, answer) == 64);
static_assert(offsetof(Mailbox, seen_ns) == 72 && offsetof(Mailbox, done_ns) == 80);
static_assert(sizeof(Mailbox) == 128);

constexpr int64_t mailboxes_offset(int64_t mailboxes) {
  constexpr auto kAlign = static_cast<int64_t>(kBoardAlign);
  return (mailboxes * static_cast<int64_t>(sizeof(uint32_t)) + kAlign - 1) / kAlign * kAlign;
}

constexpr int64_t board_bytes(int64_t mailboxes) {
  return mailboxes_offset(mailboxes) + mailboxes * static_cast<int64_t>(sizeof(Mailbox));
}

// Where a mailbox's requests find their operands: T tokens at most, K = top_k.
struct Operands {
  const void* x;         // [T, H] in the layer's dtype
  const int32_t* ids;    // [T, K], see Routing
  const float* weights;  // [T, K]
  int64_t top_k;
  const int32_t* map;  // [map_size], see Routing
  int64_t map_size;
  float* out;  // [T, H]
};

// The service thread watches for requests and computes them, one at a time, on the engine's pool,
// whose caller it is. It watches without a break until `idle` has passed since the last request or
// `wake`, then looks about once a millisecond, or once in ten after a second without either.
class Doorbell {
 public:
  // Serves a request of so many tokens. Runs on the service thread, never two at once.
  using Compute = std::function<void(int64_t tokens)>;

  struct Settings {
    double timeout_s = 3.0;
    double idle_s = 0.02;
  };

  // Of one mailbox, since it was added.
  struct Stats {
    int64_t requests;  // answered with kDone
    int64_t tokens;    // of those
    int64_t busy_ns;   // from seen to done, summed
  };

  // The board of `mailboxes` must outlive the doorbell. Throws std::invalid_argument for one that
  // is not aligned, for a number of mailboxes below 1 or of seconds not from 0.001 to 3600.
  Doorbell(std::shared_ptr<Engine> engine, std::byte* board, int64_t mailboxes, Settings settings);
  // Stops; see there what is left to the caller.
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // The index of a new mailbox, whose part of the board it clears. May be called at any time; the
  // next request is looked for first in the mailbox behind the last one served, so best in the
  // order in which a step asks. Throws std::invalid_argument when the board is full or the operands
  // do not suit the plan.
  int64_t add(std::string layer, std::shared_ptr<const Plan> plan, const Operands& operands,
              int64_t max_tokens);
  int64_t add(std::string layer, int64_t max_tokens, Compute compute);

  // Starts the threads, if they do not run. Throws std::runtime_error when the doorbell has failed,
  // or in a process forked from the engine's.
  void start();
  // To be called before work that will ask is launched: the service thread is watching then.
  void wake();
  // Ends the threads when the request being computed is done, and answers all others with kFailed.
  // Later requests get no answer, until `start`. A service thread that does not end within
  // `timeout` is left to itself: false then, its request is answered with kFailed, and the memory
  // of its mailbox must be kept. Nothing to do in a forked process.
  bool stop();

  // One flag.
  bool failed() const;
  // What failed and of which layer, or empty. After a failure while nothing was asked it waits for
  // the next layer to ask, up to a second, to name that one.
  std::string error() const;
  // Of every mailbox, in the order in which they were added.
  std::vector<Stats> stats() const;

 private:
  class Service;
  const std::shared_ptr<Engine> engine_;
  // Shared with the threads: one that is left to itself keeps what it uses.
  std::shared_ptr<Service> service_;
  std::mutex threads_mutex_;
  std::thread watchdog_;
  std::thread server_;
};

}  // namespace moe
