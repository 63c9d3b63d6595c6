#ifndef DDL_CORE_STALL_H_
#define DDL_CORE_STALL_H_

#include <algorithm>
#include <string>
#include <vector>

namespace ddl {

// How often a sleeping rank looks whether those that it waits for are alive.
inline constexpr double kLookAroundS = 0.05;

// Polls of a waiting rank between its limit and giving up, about 1 ms each: it may have slept through
// the limit while a message lay ready, and nobody can be in step again once it has given up.
inline constexpr int kLatePolls = 100;

// Says when a wait has become worth a warning: after 10 s or half the timeout, then ever rarer.
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
  const std::string text = std::to_string(seconds);
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
