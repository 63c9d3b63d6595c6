#include "core/tuner.h"

#include <array>
#include <string>

#include "check.h"

namespace {

// Runs `runs` times at what the variant costs, and returns how many of them were variant 1.
int RunAt(ddl::Tuner& tuner, int runs, std::array<double, 2> costs) {
  int second = 0;
  for (int run = 0; run < runs; ++run) {
    second += tuner.variant();
    tuner.Observe(costs[tuner.variant()]);
  }
  return second;
}

TEST(TunerTriesBothAndKeepsTheFaster) {
  for (const int faster : {0, 1}) {
    ddl::Tuner tuner;
    CHECK(RunAt(tuner, ddl::Tuner::kWindow, {2, 2}) == 0, "first the one");
    CHECK(RunAt(tuner, ddl::Tuner::kWindow, {2.0 + faster, 3.0 - faster}) == ddl::Tuner::kWindow,
          "then the other");
    const int runs = 50;
    CHECK(RunAt(tuner, runs, {2.0 + faster, 3.0 - faster}) == faster * runs, "then the faster");
  }
}

TEST(TunerLeavesAVariantThatHasBecomeSlower) {
  ddl::Tuner tuner;
  RunAt(tuner, 20, {2, 3});
  CHECK(tuner.variant() == 0, "the faster");
  CHECK(RunAt(tuner, ddl::Tuner::kWindow, {9, 3}) == 0, "until it has been slow for a window");
  CHECK(RunAt(tuner, 40, {9, 3}) == 40, "then the other");
}

TEST(TunerFindsOutThatTheOtherHasBecomeFaster) {
  ddl::Tuner tuner;
  RunAt(tuner, 50, {2, 8});
  CHECK(tuner.variant() == 0, "the faster");
  // The trial was one run at 8, so the next comes 20 * 8 of time later.
  const int period = static_cast<int>(ddl::Tuner::kTrialInterval) * 8 / 2;
  CHECK(RunAt(tuner, 2 * period, {2, 1}) >= period, "from a trial on");
  CHECK(tuner.variant() == 1, "the faster now");
}

TEST(TunerSpendsLittleOnTrials) {
  ddl::Tuner tuner;
  constexpr int kRuns = 100'000;
  RunAt(tuner, ddl::Tuner::kWindow, {1, 7});
  CHECK(RunAt(tuner, 10, {1, 7}) == 1, "one run tells enough");
  const int trials = RunAt(tuner, kRuns, {1, 7});
  CHECK(trials > 0, "there are some");
  const double spent = 7 * trials, all = spent + kRuns - trials;
  CHECK(spent * ddl::Tuner::kTrialInterval <= all, std::to_string(trials));
}

TEST(TunerIsNotMisledByRunsThatOtherWorkDelays) {
  ddl::Tuner tuner;
  RunAt(tuner, 2 * ddl::Tuner::kWindow, {2, 3});
  // Fewer runs than bring a trial.
  for (int run = 0; run < 40; ++run) {
    CHECK(tuner.variant() == 0, std::to_string(run));
    tuner.Observe(run % ddl::Tuner::kWindow == 0 ? 2 : 5);
  }
}

TEST(TunerDoesNotAlternateBetweenEqualVariants) {
  ddl::Tuner tuner;
  RunAt(tuner, 2 * ddl::Tuner::kWindow, {2, 2});
  const int variant = tuner.variant();
  for (int run = 0; run < 70; ++run) {
    tuner.Observe(run % 2 == 0 ? 2.04 : 2.0);
    CHECK(tuner.variant() == variant, std::to_string(run));
  }
}

}  // namespace
