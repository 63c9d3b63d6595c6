#ifndef DDL_CORE_BACKOFF_H_
#define DDL_CORE_BACKOFF_H_

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace ddl {

// For the body of a spin loop: leaves the core's units to its other hardware thread.
inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps that grow with the time waited: a late peer costs at most an eighth more, and a long wait
// a thousand short polls a second.
class Backoff {
 public:
  // Up to `yield_s` the core is only offered to others; then this thread sleeps. By default soon:
  // others compute while a rank waits, often for milliseconds.
  explicit Backoff(double yield_s = 20e-6) : yield_s_(yield_s) {}

  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void Pause() const {
    const double elapsed = elapsed_s();
    if (elapsed < yield_s_) {
      sched_yield();
    } else {
      usleep(static_cast<useconds_t>(std::clamp(elapsed / 8 * 1e6, 5.0, 1000.0)));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  const double yield_s_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace ddl

#endif  // DDL_CORE_BACKOFF_H_
