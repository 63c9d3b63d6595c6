// Threads of the library's own, beside whatever threads start them.

#include "core/thread.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <cfenv>
#include <cstring>
#include <string>

#include "check.h"
#include "core/worker.h"
#include "subnormals.h"
#include "transport/shared_segment.h"

namespace {

// How often a signal, as of a profiler's clock, interrupts the kernel before it reserves memory.
int interruptions = 0;

}  // namespace

// In place of the C library's.
extern "C" int posix_fallocate(int file, off_t offset, off_t length) {
  if (interruptions > 0) return --interruptions, EINTR;
  return fallocate(file, 0, offset, length) == 0 ? 0 : errno;
}

namespace {

TEST(AThreadComputesAsByDefaultWhateverStartsIt) {
  FlushSubnormals();
  bool thread_keeps = false, worker_keeps = false;
  const bool here = KeepsSubnormals();
  ddl::StartThread("ddl-test", [&] { thread_keeps = KeepsSubnormals(); }).join();
  ddl::Worker worker("ddl-test");
  worker.Submit([&] {
    worker_keeps = KeepsSubnormals();
    return ddl::Status();
  });
  ddl::Status status;
  CHECK(worker.Await(Paced(10), &status) && status.ok(), status.message());
  std::fesetenv(FE_DFL_ENV);
  CHECK(!here && thread_keeps && worker_keeps, "subnormal numbers were taken for zeros");
}

TEST(AThreadGetsNoSignalsButOfItsFaults) {
  sigset_t before, after, mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &before);
  ddl::StartThread("ddl-test", [&] { pthread_sigmask(SIG_BLOCK, nullptr, &mask); }).join();
  for (const int one : {SIGTERM, SIGINT, SIGUSR1, SIGPROF, SIGALRM, SIGCHLD, SIGABRT}) {
    CHECK(sigismember(&mask, one) == 1, strsignal(one));
  }
  for (const int one : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
    CHECK(sigismember(&mask, one) == 0, strsignal(one));
  }
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  for (int one = 1; one < 32; ++one) {
    CHECK(sigismember(&before, one) == sigismember(&after, one), strsignal(one));
  }
}

TEST(MemoryIsSharedBesideSignals) {
  interruptions = 3;
  ddl::SharedSegment segment;
  ddl::SharedSegment::Address address;
  const ddl::Status made = segment.Create(1 << 20, &address);
  CHECK(made.ok() && interruptions == 0, made.message());
}

}  // namespace
