#include "engine/topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace moe {
namespace {

// This file asks C's library alone: std::filesystem and streams are code of the C++ library whose
// layout has changed between its versions, and a process that loads torch and CUDA has parts of
// several.
struct Close {
  void operator()(DIR* directory) const { closedir(directory); }
  void operator()(FILE* file) const { std::fclose(file); }
};

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, Close> open(opendir(directory.c_str()));
  while (const dirent* entry = open ? readdir(open.get()) : nullptr) names.push_back(entry->d_name);
  return names;
}

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
    for (const std::string& tid : names_in("/proc/self/task")) {
      if (tid[0] == '.') continue;
      const std::vector<int> theirs = cpus_of_thread(std::atoi(tid.c_str()));
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
  const std::unique_ptr<FILE, Close> file(std::fopen(path.c_str(), "r"));
  int value = fallback;
  return file && std::fscanf(file.get(), "%d", &value) == 1 ? value : fallback;
}

// A CPU's directory holds a link called node<N> where the machine has NUMA.
int node_of(int cpu) {
  for (const std::string& name : names_in(cpu_directory(cpu))) {
    if (name.rfind("node", 0) == 0 && name.size() > 4 && name[4] >= '0' && name[4] <= '9') {
      return std::atoi(name.c_str() + 4);
    }
  }
  return 0;
}

}  // namespace

std::vector<Core> physical_cores() {
  std::vector<Core> cores;
  std::map<std::pair<int, int>, size_t> seen;
  for (const int cpu : allowed_cpus()) {
    const std::string topology = cpu_directory(cpu) + "/topology/";
    const int package = read_int(topology + "physical_package_id", -1);
    const int core = read_int(topology + "core_id", -1);
    if (core >= 0) {
      const auto [entry, is_new] = seen.try_emplace({package, core}, cores.size());
      if (!is_new) {
        cores[entry->second].siblings.push_back(cpu);
        continue;
      }
    }
    cores.push_back({cpu, node_of(cpu), {cpu}});
  }
  std::stable_sort(cores.begin(), cores.end(),
                   [](const Core& a, const Core& b) { return a.node < b.node; });
  return cores;
}

double cpu_quota(const std::string& root) {
  double quota = -1;
  double period = -1;
  if (const std::unique_ptr<FILE, Close> v2(std::fopen((root + "/cpu.max").c_str(), "r")); v2) {
    // "max" instead of the first number: no limit.
    if (std::fscanf(v2.get(), "%lf %lf", &quota, &period) != 2) quota = -1;
  } else {
    quota = read_int(root + "/cpu/cpu.cfs_quota_us", -1);
    period = read_int(root + "/cpu/cpu.cfs_period_us", -1);
  }
  return quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::max();
}

std::vector<int> callers_cpus() { return cpus_of_thread(0); }

}  // namespace moe
