#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <vector>

namespace ddl {
namespace {

int CountUnion(const std::vector<std::vector<char>>& masks) {
  std::vector<char> all;
  for (const std::vector<char>& mask : masks) {
    all.resize(std::max(all.size(), mask.size()));
    for (size_t i = 0; i < mask.size(); ++i) all[i] = static_cast<char>(all[i] | mask[i]);
  }
  int count = 0;
  for (const char bits : all) count += __builtin_popcount(static_cast<unsigned char>(bits));
  return count;
}

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// Of one group. No such file, or no numbers in it ("max", -1): no limit.
double Quota(const std::string& folder, bool v2) {
  double quota = -1, period = 0;
  if (v2) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// The least of this group and those above it. In a container its path may be the host's, of which
// only the end of the way up is there.
double QuotaOfPath(const std::string& hierarchy, std::string path, bool v2) {
  double least = kUnlimited;
  while (true) {
    least = std::min(least, Quota(hierarchy + path, v2));
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return least;
    path.resize(slash);
  }
}

double CoresOfQuota(const std::string& root) {
  double least = kUnlimited;
  std::ifstream groups(root + "/proc/self/cgroup");
  // hierarchy:controllers:path; version 2 has no controllers here.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1), all = root + "/sys/fs/cgroup";
    if (controllers == ",,") {
      least = std::min(least, QuotaOfPath(all, path, true));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      least = std::min(least, QuotaOfPath(all + "/cpu", path, false));
    }
  }
  return least;
}

}  // namespace

std::vector<char> Affinity() {
  // The kernel says EINVAL where its mask is longer.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 20); cpus *= 2) {
    std::vector<char> mask(CPU_ALLOC_SIZE(cpus));
    cpu_set_t* set = reinterpret_cast<cpu_set_t*>(mask.data());
    if (sched_getaffinity(0, mask.size(), set) == 0) return mask;
    if (errno != EINVAL) break;
  }
  return {1};
}

double AvailableCores(const std::vector<std::vector<char>>& affinities, const std::string& root) {
  return std::min<double>(CountUnion(affinities), CoresOfQuota(root));
}

}  // namespace ddl
