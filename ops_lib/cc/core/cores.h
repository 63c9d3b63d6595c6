#ifndef DDL_CORE_CORES_H_
#define DDL_CORE_CORES_H_

#include <string>
#include <vector>

namespace ddl {

// The cores that this process may run on: a bit for each, as sched_getaffinity(2) has them.
std::vector<char> Affinity();

// How many cores processes of one host with these affinities may use at once: those of any of them,
// or as many as the quota of this process's control group pays for, if that is less. `root` stands
// before /proc and /sys, for tests.
//
// Source: sched_setaffinity(2); Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max, and
// Documentation/scheduler/sched-bwc.rst, cpu.cfs_quota_us, for version 1.
double AvailableCores(const std::vector<std::vector<char>>& affinities,
                      const std::string& root = "");

}  // namespace ddl

#endif  // DDL_CORE_CORES_H_
