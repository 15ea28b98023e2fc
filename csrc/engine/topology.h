// The CPUs this process may use, as the operating system describes them.
#pragma once

#include <string>
#include <vector>

namespace moe {

struct Core {
  int cpu;                    // the logical CPU to pin to: the first sibling the process may run on
  int node;                   // its NUMA node, 0 on a machine without NUMA
  std::vector<int> siblings;  // its logical CPUs that the process may run on, this one too
};

// One entry for each physical core in the calling thread's affinity mask (which cpusets and
// containers narrow; where every thread is pinned to a CPU of its own, in all of their masks),
// ordered by node, then by CPU. SMT siblings are no entries: two threads of one core share
// its load ports and gain nothing from a stream out of memory.
// Where /sys does not tell, every allowed CPU counts as a core of node 0. Never empty.
std::vector<Core> physical_cores();

// How many CPUs' worth of time the process's cgroup is granted, whatever CPUs it may use; a huge
// number where it has no limit. A container sees its own cgroup at `root`.
double cpu_quota(const std::string& root = "/sys/fs/cgroup");

// What the calling thread may run on; empty where that is not known.
std::vector<int> callers_cpus();

}  // namespace moe
