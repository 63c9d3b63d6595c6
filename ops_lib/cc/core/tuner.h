#ifndef DDL_CORE_TUNER_H_
#define DDL_CORE_TUNER_H_

#include <array>
#include <cstdint>

namespace ddl {

// Finds out which of two ways to do the same thing is the faster one here and now, by what each has
// cost: a two-armed bandit whose arms' rewards change. Pure: it has no clock and does nothing.
//
// A way's record is its least cost in its last kWindow runs, because whatever else the machine does
// only ever makes a run slower. The way with the better record is taken; once it has become slower
// than the other's record for a whole window, the other one is. What the other one would cost now
// shows only in a trial of a window's length, which takes place as soon as it is expected to have
// cost 1 / kPatience of the time since the last.
class Tuner {
 public:
  static constexpr int kWindow = 4;
  static constexpr double kPatience = 64;
  // The other one must be better by this, so that ways alike do not take turns.
  static constexpr double kGain = 0.95;

  // 0 or 1: the way to take in the next run.
  int way() const { return way_; }

  // The run took that way, at this cost: time, in any unit.
  void Ran(double cost);

 private:
  // 0 unless all of the window has been run.
  double Record(int way) const;

  int way_ = 0;
  int64_t runs_ = 0;
  double elapsed_ = 0;  // since the last trial
  std::array<std::array<double, kWindow>, 2> costs_{};
};

}  // namespace ddl

#endif  // DDL_CORE_TUNER_H_
