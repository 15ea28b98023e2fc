#include "engine/topology.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace moe {
namespace {

// What thread `tid` of this process (0: the caller) may run on; empty where that is not known.
std::vector<int> cpus_of_thread(pid_t tid) {
  // The kernel rejects a mask smaller than its own, so ask again with a larger one.
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 4) {
    cpu_set_t* mask = CPU_ALLOC(static_cast<size_t>(capacity));
    if (mask == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
    std::vector<int> cpus;
    if (sched_getaffinity(tid, bytes, mask) == 0) {
      for (int cpu = 0; cpu < capacity; ++cpu) {
        if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, mask)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(mask);
    if (!cpus.empty()) return cpus;
  }
  return {};
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus = cpus_of_thread(0);
  if (cpus.size() == 1) {
    // vLLM's CPU build pins each of its OpenMP threads, the one that calls us among them, to one
    // CPU: the process may use all of those. Under `taskset` to one CPU all threads share it.
    std::set<int> pinned(cpus.begin(), cpus.end());
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
      const std::vector<int> theirs = cpus_of_thread(std::atoi(entry.path().filename().c_str()));
      if (theirs.size() == 1) pinned.insert(theirs.front());
    }
    cpus.assign(pinned.begin(), pinned.end());
  }
  if (cpus.empty()) {
    cpus.resize(std::max(1u, std::thread::hardware_concurrency()));
    for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = static_cast<int>(i);
  }
  return cpus;
}

std::string cpu_directory(int cpu) { return "/sys/devices/system/cpu/cpu" + std::to_string(cpu); }

int read_int(const std::string& path, int fallback) {
  std::ifstream file(path);
  int value = fallback;
  return file >> value ? value : fallback;
}

// A CPU's directory holds a link called node<N> where the machine has NUMA.
int node_of(int cpu) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(cpu_directory(cpu), error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("node", 0) == 0 && name.size() > 4 && name[4] >= '0' && name[4] <= '9') {
      return std::atoi(name.c_str() + 4);
    }
  }
  return 0;
}

}  // namespace

std::vector<Core> physical_cores() {
  std::vector<Core> cores;
  std::set<std::pair<int, int>> seen;
  for (const int cpu : allowed_cpus()) {
    const std::string topology = cpu_directory(cpu) + "/topology/";
    const int package = read_int(topology + "physical_package_id", -1);
    const int core = read_int(topology + "core_id", -1);
    const bool known = core >= 0;
    if (known && !seen.insert({package, core}).second) continue;
    cores.push_back({cpu, node_of(cpu)});
  }
  std::stable_sort(cores.begin(), cores.end(),
                   [](const Core& a, const Core& b) { return a.node < b.node; });
  return cores;
}

}  // namespace moe
