#include "core/tuner.h"

#include <algorithm>

namespace ddl {

void Tuner::Ran(double cost) {
  const int other = 1 - way_;
  const double rival = Record(other);
  const bool in_trial = Record(way_) == 0 && rival > 0;
  // One count for both ways: the runs of a trial follow each other, so they fill the window.
  costs_[way_][runs_++ % kWindow] = cost;
  elapsed_ += cost;
  if (in_trial) {
    trial_ += cost;
    if (cost > kHopeless * rival) {
      costs_[way_].fill(cost);
      way_ = other;
      return;
    }
  }
  if (Record(way_) == 0) return;
  if (elapsed_ >= kPatience * trial_) {
    costs_[other].fill(0);
    elapsed_ = trial_ = 0;
    way_ = other;
  } else if (rival < kGain * Record(way_)) {
    way_ = other;
  }
}

double Tuner::Record(int way) const {
  return *std::min_element(costs_[way].begin(), costs_[way].end());
}

}  // namespace ddl
