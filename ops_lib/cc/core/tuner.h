#ifndef DDL_CORE_TUNER_H_
#define DDL_CORE_TUNER_H_

#include <array>
#include <cstdint>

namespace ddl {

// Finds out which of two variants of the same work is the faster one here and now, by what each has
// cost: a two-armed bandit whose arms' rewards change. Pure: it has no clock and does nothing.
//
// A variant's best cost is that of its last kWindow runs, because whatever else the machine does
// only ever makes a run slower. The variant with the lower best cost is taken; once it has been
// slower than the other one's for a whole window, the other one is. What the other one would cost
// now shows only in a trial: a window of runs, or one run that takes far too long. The next trial
// comes when kTrialInterval times as long has passed as the last one took.
class Tuner {
 public:
  static constexpr int kWindow = 4;
  static constexpr double kTrialInterval = 20;
  // The other one must be better by this, so that equal variants do not alternate.
  static constexpr double kMinGain = 0.95;
  // A run of a trial that costs so many times the other's best cost ends it.
  static constexpr double kTrialLimit = 2;

  // 0 or 1: the variant to run next.
  int variant() const { return variant_; }

  // That variant was run, at this cost: time, in any unit.
  void Observe(double cost);

 private:
  // 0 until all of the window has been run: during a trial.
  double BestCost(int variant) const;

  int variant_ = 0;
  int64_t runs_ = 0;
  double trial_ = 0;    // cost of the last trial
  double elapsed_ = 0;  // since it began
  std::array<std::array<double, kWindow>, 2> costs_{};
};

}  // namespace ddl

#endif  // DDL_CORE_TUNER_H_
