#include "algorithms/store_choice.h"

namespace ddl {

int StoreChoice::CaseOf(Kind kind, int64_t nbytes) {
  int range = 0;
  for (int64_t end = int64_t{64} << 10; nbytes >= end && range < kRanges - 1; end *= 4) ++range;
  return kind * kRanges + range;
}

bool StoreChoice::UsesNonTemporal(Kind kind, int64_t nbytes) const {
  if (own_.stores != Stores::kTuned) return own_.stores == Stores::kNonTemporal;
  return last_.non_temporal.load() >> CaseOf(kind, nbytes) & 1;
}

void StoreChoice::Tune(Kind kind, int64_t nbytes, double seconds) {
  if (own_.stores != Stores::kTuned) return;
  const int which = CaseOf(kind, nbytes);
  Tuner& tuner = own_.tuners[which];
  tuner.Observe(seconds / static_cast<double>(nbytes));
  // Told now, so that all know it when they begin the next one.
  const uint64_t bit = uint64_t{1} << which, before = own_.non_temporal.load();
  const uint64_t now = tuner.variant() == 1 ? before | bit : before & ~bit;
  if (now != before) own_.non_temporal.store(now);
}

}  // namespace ddl
