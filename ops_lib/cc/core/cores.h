#ifndef DDL_CORE_CORES_H_
#define DDL_CORE_CORES_H_

#include <string>

namespace ddl {

// How many cores this process may use at once: those of its affinity, or as many as the quota of its
// control group pays for, if that is less. `root` stands before /proc and /sys, for tests.
//
// Source: sched_setaffinity(2); Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max, and
// Documentation/scheduler/sched-bwc.rst, cpu.cfs_quota_us, for version 1.
double AvailableCores(const std::string& root = "");

}  // namespace ddl

#endif  // DDL_CORE_CORES_H_
