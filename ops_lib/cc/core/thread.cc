#include "core/thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <cfenv>
#include <utility>

namespace ddl {

std::thread StartThread(const std::string& name, std::function<void()> run) {
  // The new thread inherits the mask, so that none can reach it before it has its own.
  sigset_t all, before;
  sigfillset(&all);
  // Blocked, the handler that tells where a fault was would not be called.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
    sigdelset(&all, fault);
  }
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread thread([name, run = std::move(run)] {
      std::fesetenv(FE_DFL_ENV);
      // Else the kernel rounds its short sleeps up by 50 microseconds.
      prctl(PR_SET_TIMERSLACK, 1000UL);
      prctl(PR_SET_NAME, name.c_str());
      run();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace ddl
