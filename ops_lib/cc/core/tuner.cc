#include "core/tuner.h"

#include <algorithm>

namespace ddl {

void Tuner::Observe(double cost) {
  const int other = 1 - variant_;
  const double other_best = BestCost(other);
  const bool in_trial = BestCost(variant_) == 0 && other_best > 0;
  // One count for both variants: the runs of a trial follow each other, so they fill the window.
  costs_[variant_][runs_++ % kWindow] = cost;
  elapsed_ += cost;
  if (in_trial) {
    trial_ += cost;
    if (cost > kTrialLimit * other_best) {
      costs_[variant_].fill(cost);
      variant_ = other;
      return;
    }
  }
  if (BestCost(variant_) == 0) return;
  if (elapsed_ >= kTrialInterval * trial_) {
    costs_[other].fill(0);
    elapsed_ = trial_ = 0;
    variant_ = other;
  } else if (other_best < kMinGain * BestCost(variant_)) {
    variant_ = other;
  }
}

double Tuner::BestCost(int variant) const {
  return *std::min_element(costs_[variant].begin(), costs_[variant].end());
}

}  // namespace ddl
