#ifndef DDL_TESTS_RANKS_H_
#define DDL_TESTS_RANKS_H_

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/host_group.h"
#include "transport/shared_segment.h"

// Counts ranks that are processes: made before they are.
class SharedCount {
 public:
  SharedCount()
      : count_(new (mmap(nullptr, sizeof(*count_), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<int>(0)) {}
  SharedCount(const SharedCount&) = delete;
  ~SharedCount() { munmap(count_, sizeof(*count_)); }

  void Add() { count_->fetch_add(1); }
  int count() const { return count_->load(); }
  void Await(int count) const {
    while (count_->load() < count) usleep(1000);
  }

 private:
  std::atomic<int>* const count_;
};

using RankFunction = std::function<void(ddl::HostGroup&)>;

// Runs `function` on `size` ranks, each a thread.
inline void RunThreads(int size, const RankFunction& function, double timeout_s = 60) {
  const int64_t nbytes = ddl::HostGroup::Nbytes(size);
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096),
                                                std::free);
  ddl::HostGroup::Format(memory.get(), size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ddl::HostGroup group(memory.get(), rank, size, Paced(timeout_s));
      function(group);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The same, each rank a process. While they run, `meanwhile` gets their ids. A rank fails the test
// with its checks, or if it is killed, unless it is `victim`.
inline void RunProcesses(int size, const RankFunction& function, double timeout_s = 60,
                         int victim = -1,
                         const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  ddl::SharedSegment segment;
  ddl::SharedSegment::Address address;
  const ddl::Status made = segment.Create(ddl::HostGroup::Nbytes(size), &address);
  CHECK(made.ok(), made.message());
  ddl::HostGroup::Format(segment.base(), size);
  std::fflush(nullptr);  // else each child prints it again
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    failed_checks = 0;
    {
      ddl::SharedSegment own;
      const ddl::Status attached = own.Attach(address);
      CHECK(attached.ok(), attached.message());
      own.Seal();
      ddl::HostGroup group(own.base(), rank, size, timeout_s);
      function(group);
    }
    std::fflush(nullptr);
    _exit(failed_checks == 0 ? 0 : 1);
  }
  if (meanwhile) meanwhile(children);
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    CHECK(rank == victim || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
          "rank " + std::to_string(rank) + " ended with status " + std::to_string(status));
  }
}

#endif  // DDL_TESTS_RANKS_H_
