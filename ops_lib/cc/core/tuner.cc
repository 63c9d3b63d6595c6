#include "core/tuner.h"

#include <algorithm>

namespace ddl {

void Tuner::Ran(double cost) {
  // Both ways count together: a window is run without a break, or else the newest of it are.
  costs_[way_][runs_++ % kWindow] = cost;
  elapsed_ += cost;
  const int other = 1 - way_;
  if (Record(way_) == 0) return;
  if (elapsed_ >= kPatience * kWindow * Record(other)) {
    costs_[other].fill(0);
    elapsed_ = 0;
    way_ = other;
  } else if (Record(other) < kGain * Record(way_)) {
    way_ = other;
  }
}

double Tuner::Record(int way) const {
  return *std::min_element(costs_[way].begin(), costs_[way].end());
}

}  // namespace ddl
