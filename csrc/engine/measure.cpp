#include "engine/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "kernels/fetch.h"

namespace moe {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;
// Tile products of a task: some 60 us. A thread that is slow, or starts late, leaves the others
// more.
constexpr int64_t kProducts = 10000;

struct Reading {
  const std::byte* memory;
  int64_t bytes;
  std::atomic<uint64_t>* sink;
};

void read_task(const void* context, int64_t task, int) {
  const Reading& reading = *static_cast<const Reading*>(context);
  const int64_t begin = task * kPiece;
  const int64_t end = std::min(begin + kPiece, reading.bytes) / 64 * 64;
  uint64_t sums[8] = {};
  for (int64_t at = begin; at < end; at += 64) {
    // As the kernels do: the hardware's own prefetching leaves bandwidth unused.
    fetch_ahead(reading.memory + at, kAheadBytes);
    uint64_t line[8];
    std::memcpy(line, reading.memory + at, sizeof line);
    for (int i = 0; i < 8; ++i) sums[i] ^= line[i];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum ^= part;
  // Keeps the compiler from leaving the loads out.
  reading.sink->fetch_xor(sum, std::memory_order_relaxed);
}

void multiply_task(const void* context, int64_t, int) {
  static_cast<const Isa*>(context)->multiply_tiles(kProducts);
}

double seconds(Pool& pool, const Phase& phase, const void* context) {
  const auto start = std::chrono::steady_clock::now();
  pool.run(&phase, 1, context);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double read_seconds(Engine& engine, const void* memory, int64_t bytes) {
  std::atomic<uint64_t> sink{0};
  const Reading reading{static_cast<const std::byte*>(memory), bytes, &sink};
  return seconds(engine.pool(), {(bytes + kPiece - 1) / kPiece, read_task}, &reading);
}

double tile_multiply_adds(Engine& engine, int64_t count) {
  if (engine.isa().multiply_tiles == nullptr) return 0;
  const int64_t tasks = engine.threads() * std::max<int64_t>(1, count / kProducts);
  const double elapsed = seconds(engine.pool(), {tasks, multiply_task}, &engine.isa());
  return static_cast<double>(tasks * kProducts) * 16 * 16 * 32 / elapsed;
}

}  // namespace moe
