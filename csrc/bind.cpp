// The Python module: checks numbers, releases the GIL, converts. Tensors arrive as addresses, whose
// dtypes and shapes plan.py has checked: torch is not linked, and DLPack costs tens of microseconds
// a call, a good part of a decode step's layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/doorbell.h"
#include "engine/measure.h"
#include "engine/plan.h"
#include "engine/topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class Enum>
Enum checked_enum(int32_t value, int32_t count, const char* what) {
  if (value < 0 || value >= count) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(value) +
                                " is not one of the " + std::to_string(count) +
                                " this build knows");
  }
  return static_cast<Enum>(value);
}

moe::Matrix make_matrix(Address weight, int64_t rows, int64_t row_bytes, int64_t parts,
                        Address bias, Address scale, int64_t scale_expert_bytes,
                        int64_t scale_row_bytes, int64_t scale_block_rows, int64_t scale_part_rows,
                        int64_t scale_shift, Address zero, Address global) {
  if (weight == 0 || rows < 1 || parts < 1 || rows % parts != 0 || scale_block_rows < 1 ||
      scale_shift < 0 || scale_shift > 63) {
    throw std::invalid_argument("a matrix needs weights, whole parts and positive sizes");
  }
  return {.weight = pointer<const std::byte>(weight),
          .expert_bytes = rows * row_bytes,
          .row_bytes = row_bytes,
          .rows = rows,
          .bias = pointer<const std::byte>(bias),
          .part_rows = rows / parts,
          .scale = pointer<const std::byte>(scale),
          .scale_expert_bytes = scale_expert_bytes,
          .scale_row_bytes = scale_row_bytes,
          .scale_block_rows = scale_block_rows,
          .scale_part_rows = scale_part_rows,
          .scale_shift = scale_shift,
          .zero = pointer<const std::byte>(zero),
          .global = pointer<const float>(global)};
}

std::shared_ptr<moe::Plan> make_plan(std::shared_ptr<moe::Engine> engine, const moe::Matrix& w13,
                                     const moe::Matrix& w2, int64_t experts, int64_t hidden,
                                     int64_t intermediate, int32_t format, int32_t dtype,
                                     int32_t activation, bool gated, bool interleaved, float alpha,
                                     float beta, float limit, bool router_weight_on_input,
                                     int64_t max_tokens, int64_t top_k) {
  if (experts < 1 || hidden < 1 || intermediate < 1 || max_tokens < 1 || top_k < 1) {
    throw std::invalid_argument("a plan needs positive sizes");
  }
  if (w13.rows != intermediate * (gated ? 2 : 1) || w2.rows != hidden) {
    throw std::invalid_argument("the matrices' rows do not fit the layer's sizes");
  }
  const moe::Layer layer{
      .w13 = w13,
      .w2 = w2,
      .experts = experts,
      .hidden = hidden,
      .intermediate = intermediate,
      .format = checked_enum<moe::Format>(format, moe::kFormats, "format"),
      .dtype = checked_enum<moe::Dtype>(dtype, moe::kDtypes, "dtype"),
      .activation = checked_enum<moe::Activation>(activation, moe::kActivations, "activation"),
      .gated = gated,
      .interleaved = interleaved,
      .alpha = alpha,
      .beta = beta,
      .limit = limit,
      .router_weight_on_input = router_weight_on_input};
  return std::make_shared<moe::Plan>(std::move(engine), layer, max_tokens, top_k);
}

struct Call {
  moe::Job job;
  moe::Routing routing;
};

Call make_call(const moe::Plan& plan, Address x, Address ids, Address weights, int64_t tokens,
               int64_t top_k, Address map, int64_t map_size, Address out, bool out_bf16,
               bool accumulate, int64_t inner_begin, int64_t inner_end) {
  if (tokens < 1 || top_k < 1) {
    throw std::invalid_argument("a call needs tokens >= 1 and top_k >= 1");
  }
  if (inner_begin < 0 || inner_begin >= inner_end || inner_end > plan.layer().intermediate) {
    throw std::invalid_argument("the part of the intermediate dimension is empty or out of range");
  }
  return {.job = {.x = pointer<const void>(x),
                  .out = pointer<void>(out),
                  .out_bf16 = out_bf16,
                  .accumulate = accumulate,
                  .inner_begin = inner_begin,
                  .inner_end = inner_end},
          .routing = {.ids = pointer<const int32_t>(ids),
                      .weights = pointer<const float>(weights),
                      .tokens = tokens,
                      .top_k = top_k,
                      .map = pointer<const int32_t>(map),
                      .map_size = map_size}};
}

// Becomes 1 at the end of a scope, behind all that was written in it. Null: nothing.
class Signal {
 public:
  explicit Signal(uint32_t* word) : word_(word) {}
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  ~Signal() {
    if (word_ != nullptr) std::atomic_ref<uint32_t>(*word_).store(1, std::memory_order_release);
  }

 private:
  uint32_t* word_;
};

// A call that goes on in the engine's own thread, which never needs the GIL. Its end is waited for
// by whoever lets go of it last, unless it was abandoned, or this is a forked process, where it has
// no end. It owns what it uses: Python's collector of cycles clears objects in any order, and does
// not see these.
class Running {
 public:
  Running(std::shared_ptr<const moe::Plan> plan, const Call& call, Address done, nb::object used)
      : used_(std::move(used)),
        plan_(std::move(plan)),
        seconds_(plan_->engine().runner().run([plan = plan_.get(), call, done] {
          const Signal signal(pointer<uint32_t>(done));
          const auto began = std::chrono::steady_clock::now();
          plan->run(call.job, call.routing);
          return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        })) {}

  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    if (abandoned_) return;
    if (!plan_->engine().pool().usable()) {
      abandon();
      return;
    }
    const nb::gil_scoped_release unlocked;
    seconds_.wait();
  }

  // The seconds it took; nothing where it goes on after `timeout` seconds, which are without end
  // below 0. Counts its looks instead of reading a clock, so that a process that was stopped and
  // continued is not late. Throws what the call has thrown; may be asked again.
  std::optional<double> wait(double timeout) const {
    plan_->engine().pool().require_usable();
    if (timeout >= 0) {
      const double period = std::min(kLook, timeout / 4);
      const std::chrono::duration<double> look(period);
      for (double waited = 0; seconds_.wait_for(look) != std::future_status::ready;) {
        waited += period;
        if (waited >= timeout) return std::nullopt;
      }
    }
    return seconds_.get();
  }

  // Nobody waits for its end any more: what it uses is never freed.
  void abandon() {
    abandoned_ = true;
    used_.release();
  }

 private:
  static constexpr double kLook = 0.1;  // seconds

  nb::object used_;
  std::shared_ptr<const moe::Plan> plan_;
  std::shared_future<double> seconds_;
  bool abandoned_ = false;  // written and read with the GIL
};

std::shared_ptr<moe::Doorbell> make_doorbell(std::shared_ptr<moe::Engine> engine, Address board,
                                             int64_t mailboxes, double timeout, double idle) {
  return std::make_shared<moe::Doorbell>(
      std::move(engine), pointer<std::byte>(board), mailboxes,
      moe::Doorbell::Settings{.timeout_s = timeout, .idle_s = idle});
}

int64_t add_mailbox(moe::Doorbell& doorbell, std::string layer, std::shared_ptr<moe::Plan> plan,
                    Address x, Address ids, Address weights, int64_t top_k, Address map,
                    int64_t map_size, Address out, int64_t max_tokens) {
  return doorbell.add(std::move(layer), std::move(plan),
                      {.x = pointer<const void>(x),
                       .ids = pointer<const int32_t>(ids),
                       .weights = pointer<const float>(weights),
                       .top_k = top_k,
                       .map = pointer<const int32_t>(map),
                       .map_size = map_size,
                       .out = pointer<float>(out)},
                      max_tokens);
}

// Where a GPU and the CPU find a mailbox's fields, in bytes from the board's begin.
nb::dict doorbell_offsets(int64_t mailboxes, int64_t index) {
  const int64_t mailbox =
      moe::mailboxes_offset(mailboxes) + index * static_cast<int64_t>(sizeof(moe::Mailbox));
  nb::dict offsets;
  offsets["request"] = index * static_cast<int64_t>(sizeof(uint32_t));
  offsets["tokens"] = mailbox + static_cast<int64_t>(offsetof(moe::Mailbox, tokens));
  offsets["answer"] = mailbox + static_cast<int64_t>(offsetof(moe::Mailbox, answer));
  offsets["seen_ns"] = mailbox + static_cast<int64_t>(offsetof(moe::Mailbox, seen_ns));
  offsets["done_ns"] = mailbox + static_cast<int64_t>(offsetof(moe::Mailbox, done_ns));
  return offsets;
}

}  // namespace

NB_MODULE(_engine, m) {
  // Engines that live until the interpreter exits are ordinary.
  nb::set_leak_warnings(false);

  m.def("isas_available", [] {
    std::vector<std::string> names;
    for (const moe::Isa& isa : moe::available_isas()) names.emplace_back(isa.name);
    return names;
  });
  m.def("physical_cores", [] {
    nb::list cores;
    for (const moe::Core& core : moe::physical_cores()) {
      cores.append(nb::make_tuple(core.cpu, core.node));
    }
    return cores;
  });

  nb::class_<moe::Engine>(m, "Engine")
      .def(nb::init<int, const std::string&>(), "threads"_a, "isa"_a)
      .def_prop_ro("threads", &moe::Engine::threads)
      .def_prop_ro("isa", [](const moe::Engine& engine) { return std::string(engine.isa().name); })
      .def(
          "read_seconds",
          [](moe::Engine& engine, Address memory, int64_t bytes) {
            return moe::read_seconds(engine, pointer<const void>(memory), bytes);
          },
          "memory"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("phase_seconds",
                   [](moe::Engine& engine) {
                     const moe::PhaseSeconds seconds = [&engine] {
                       const nb::gil_scoped_release unlocked;
                       return engine.phase_seconds();
                     }();
                     return nb::make_tuple(seconds.prepare, seconds.up, seconds.down, seconds.call);
                   })
      .def("tile_multiply_adds", &moe::tile_multiply_adds, "count"_a,
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<moe::Matrix>(m, "Matrix")
      .def(nb::new_(&make_matrix), nb::kw_only(), "weight"_a, "rows"_a, "row_bytes"_a, "parts"_a,
           "bias"_a, "scale"_a, "scale_expert_bytes"_a, "scale_row_bytes"_a, "scale_block_rows"_a,
           "scale_part_rows"_a, "scale_shift"_a, "zero"_a, "global_scale"_a);

  nb::class_<moe::Plan>(m, "Plan")
      .def(nb::new_(&make_plan), nb::kw_only(), "engine"_a, "w13"_a, "w2"_a, "experts"_a,
           "hidden"_a, "intermediate"_a, "format"_a, "dtype"_a, "activation"_a, "gated"_a,
           "interleaved"_a, "alpha"_a, "beta"_a, "limit"_a, "router_weight_on_input"_a,
           "max_tokens"_a, "top_k"_a)
      .def(
          "run", [](const moe::Plan& plan, const Call& call) { plan.run(call.job, call.routing); },
          "call"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "start",
          [](std::shared_ptr<moe::Plan> plan, const Call& call, Address done, nb::object used) {
            plan->engine().pool().leave_cores();
            return std::make_shared<Running>(std::move(plan), call, done, std::move(used));
          },
          "call"_a, "done"_a, "used"_a);

  nb::class_<Call>(m, "Call").def(nb::new_(&make_call), "plan"_a, "x"_a, "ids"_a, "weights"_a,
                                  "tokens"_a, "top_k"_a, "map"_a, "map_size"_a, "out"_a,
                                  "out_bf16"_a, "accumulate"_a, "inner_begin"_a, "inner_end"_a);

  nb::class_<Running>(m, "Running")
      .def("wait", &Running::wait, "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("abandon", &Running::abandon);

  m.attr("MOST_PLAN_TOKENS") = moe::kMostPlanTokens;
  m.attr("MOST_TOP_K") = moe::kMostTopK;
  m.attr("BOARD_ALIGN") = moe::kBoardAlign;
  m.attr("ASKED") = moe::kAsked;
  m.attr("DONE") = moe::kDone;
  m.attr("FAILED") = moe::kFailed;
  m.def("board_bytes", &moe::board_bytes, "mailboxes"_a);
  m.def("doorbell_offsets", &doorbell_offsets, "mailboxes"_a, "index"_a);
  nb::class_<moe::Doorbell>(m, "Doorbell")
      .def(nb::new_(&make_doorbell), nb::kw_only(), "engine"_a, "board"_a, "mailboxes"_a,
           "timeout"_a, "idle"_a)
      .def("add", &add_mailbox, nb::kw_only(), "layer"_a, "plan"_a, "x"_a, "ids"_a, "weights"_a,
           "top_k"_a, "map"_a, "map_size"_a, "out"_a, "max_tokens"_a)
      .def("start", &moe::Doorbell::start)
      .def("wake", &moe::Doorbell::wake)
      .def("stop", &moe::Doorbell::stop, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("error",
                   [](const moe::Doorbell& doorbell) {
                     if (!doorbell.failed()) return std::string();
                     const nb::gil_scoped_release released;
                     return doorbell.error();
                   })
      .def_prop_ro("stats", [](const moe::Doorbell& doorbell) {
        nb::list all;
        for (const moe::Doorbell::Stats& stats : doorbell.stats()) {
          all.append(nb::make_tuple(stats.requests, stats.tokens, stats.busy_ns));
        }
        return all;
      });
}
