#ifndef DDL_CORE_STALL_H_
#define DDL_CORE_STALL_H_

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "core/numbers.h"

namespace ddl {

// How often a sleeping rank checks the liveness of those that it waits for.
inline constexpr double kLivenessCheckS = 0.05;

// The grace period of a waiting rank between its limit and giving up, in polls of about 1 ms: it
// may have slept through the limit while a message lay ready, and the ranks cannot get back into
// step once it has given up.
inline constexpr int kGracePolls = 100;

// How long a rank has waited for others, for the limit at which it gives up. Polled at least every
// kLivenessCheckS. Time in which this rank stood still itself (SIGSTOP, a paused container) does
// not count: mostly the others did as well, and go on no sooner.
class StallClock {
 public:
  // Seconds since the start, or since Restart.
  double Poll() {
    const Clock::time_point now = Clock::now();
    waited_ += std::min<Clock::duration>(now - last_, kMostPerPoll);
    last_ = now;
    return std::chrono::duration<double>(waited_).count();
  }

  void Restart() { *this = StallClock(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kMostPerPoll{100};

  Clock::time_point last_ = Clock::now();
  Clock::duration waited_{0};
};

// When a wait is worth a warning: after 10 s or half the timeout, then less and less often.
class WarningSchedule {
 public:
  explicit WarningSchedule(double timeout_s) : next_s_(std::min(10.0, timeout_s / 2)) {}

  bool Due(double elapsed_s) {
    if (elapsed_s < next_s_) return false;
    next_s_ *= 2;
    return true;
  }

 private:
  double next_s_;
};

// "3.0 s"
inline std::string Seconds(double seconds) {
  const std::string text = Format("%f", seconds);
  return text.substr(0, text.find('.') + 2) + " s";
}

// "rank 1, rank 3": the ranks that have not arrived.
inline std::string Missing(const std::vector<bool>& arrived) {
  std::string text;
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank]) continue;
    text += text.empty() ? "rank " : ", rank ";
    text += std::to_string(rank);
  }
  return text;
}

}  // namespace ddl

#endif  // DDL_CORE_STALL_H_
