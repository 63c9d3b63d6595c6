// What the library reads from its environment and finds out about the machine.

#include "core/config.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"
#include "core/cores.h"
#include "core/stall.h"

namespace {

TEST(ThreadsAreAWholeNumber) {
  ddl::Config config;
  unsetenv("DDL_THREADS");
  CHECK(ddl::ReadConfig(&config).ok() && config.threads == 0, "by cores");
  setenv("DDL_THREADS", "3", 1);
  CHECK(ddl::ReadConfig(&config).ok() && config.threads == 3, "");
  for (const char* bad : {"0", "-1", "two", "2.5", "65", "99999999999999999999", " 2"}) {
    setenv("DDL_THREADS", bad, 1);
    const ddl::Status status = ddl::ReadConfig(&config);
    CHECK(status.code() == ddl::Code::kInvalidArgument, bad);
    CHECK(status.message() == std::string("DDL_THREADS is '") + bad +
                                  "'. Give a whole number from 1 to 64.",
          status.message());
  }
  unsetenv("DDL_THREADS");
}

TEST(SecondsHaveADecimalPoint) {
  ddl::Config config;
  setenv("DDL_STALL_TIMEOUT", "12.5", 1);
  const ddl::Status status = ddl::ReadConfig(&config);
  CHECK(status.ok() && config.stall_timeout_s == 12.5, status.message());
  CHECK(ddl::Seconds(12.5) == "12.5 s", ddl::Seconds(12.5));
  for (const char* bad : {"12,5", "0", "soon", "inf", "60 s"}) {
    setenv("DDL_STALL_TIMEOUT", bad, 1);
    CHECK(ddl::ReadConfig(&config).code() == ddl::Code::kInvalidArgument, bad);
  }
  unsetenv("DDL_STALL_TIMEOUT");
}

// A folder that stands before /proc and /sys.
class Machine {
 public:
  Machine() {
    std::string name = std::filesystem::temp_directory_path() / "machine-XXXXXX";
    root_ = mkdtemp(name.data());
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  const std::string& root() const { return root_; }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

 private:
  std::string root_;
};

TEST(CoresAreThoseOfTheAffinityOrOfTheQuota) {
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  const double all = CPU_COUNT(&before);
  {
    Machine machine;  // without control groups
    CHECK(ddl::AvailableCores({ddl::Affinity()}, machine.root()) == all, "");
    machine.Write("/proc/self/cgroup", "0::/a/b\n");
    machine.Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    CHECK(ddl::AvailableCores({ddl::Affinity()}, machine.root()) == all, "no limit");
    machine.Write("/sys/fs/cgroup/a/cpu.max", "50000 100000\n");
    CHECK(ddl::AvailableCores({ddl::Affinity()}, machine.root()) == 0.5, "of the group above");
  }
  {
    // Version 1, in a container, which does not see the host's path.
    Machine machine;
    machine.Write("/proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n");
    machine.Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    machine.Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(ddl::AvailableCores({ddl::Affinity()}, machine.root()) == all, "no limit");
    machine.Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "25000\n");
    CHECK(ddl::AvailableCores({ddl::Affinity()}, machine.root()) == 0.25, "");
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  sched_setaffinity(0, sizeof(one), &one);
  CHECK(ddl::AvailableCores({ddl::Affinity()}, "/none") == 1, "");
  sched_setaffinity(0, sizeof(before), &before);
}

TEST(CoresOfAHostAreThoseOfAnyOfItsRanks) {
  // As mpirun binds 8 ranks to 4 cores each, and 8 to the same 4.
  std::vector<std::vector<char>> bound;
  for (int rank = 0; rank < 8; ++rank) {
    bound.emplace_back(4);
    bound.back()[rank / 2] = static_cast<char>(rank % 2 == 0 ? 0x0f : 0xf0);
  }
  CHECK(ddl::AvailableCores(bound, "/none") == 32, "");
  CHECK(ddl::AvailableCores(std::vector(8, bound[0]), "/none") == 4, "");
  CHECK(ddl::AvailableCores({{1, 0}, {0, 0, 0, 1}}, "/none") == 2, "masks of two lengths");
}

}  // namespace
