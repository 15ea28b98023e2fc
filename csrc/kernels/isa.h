// Which instruction sets this build has, which of them this host runs, and the choice between them.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernel.h"

namespace moe {

struct Isa {
  const char* name;
  // The kernels for a layer's format; never null. A set without an own kernel for a format uses
  // that of the set it extends.
  const Kernels* (*kernels)(Format format, Dtype dtype);
  void (*multiply_tiles)(int64_t count);  // null without tiles
  // Asks the operating system for what the set needs; false when it is refused. Null: nothing.
  bool (*acquire)();
};

// The sets this host can run, the slowest first; "scalar" is always there.
const std::vector<Isa>& available_isas();

// The one called `name`, or the fastest that the operating system grants when it is empty.
// Throws std::invalid_argument naming those available when it is not among them or is refused.
const Isa& select_isa(const std::string& name);

}  // namespace moe
