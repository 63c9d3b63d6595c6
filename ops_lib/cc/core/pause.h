#ifndef DDL_CORE_PAUSE_H_
#define DDL_CORE_PAUSE_H_

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace ddl {

// Time waited, and sleeps that grow with it: a late peer costs at most an eighth more, and a long
// wait a thousand short polls a second.
class Pauses {
 public:
  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void Pause() const {
    const double elapsed = elapsed_s();
    if (elapsed < 200e-6) {
      sched_yield();
    } else {
      usleep(static_cast<useconds_t>(std::clamp(elapsed / 8 * 1e6, 5.0, 1000.0)));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace ddl

#endif  // DDL_CORE_PAUSE_H_
