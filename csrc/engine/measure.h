// What the machine could do at most, measured with the engine's own threads: the ceilings that the
// benchmark holds the engine's figures against.
#pragma once

#include <cstdint>

#include "engine/plan.h"

namespace moe {

// Seconds to read `bytes` of memory once, all threads sharing the work.
double read_seconds(Engine& engine, const void* memory, int64_t bytes);

// Multiply-adds of bf16 a second, all threads issuing tile products that wait for nothing, about
// `count` each. 0 where the engine's instruction set has no tiles.
double tile_multiply_adds(Engine& engine, int64_t count);

}  // namespace moe
