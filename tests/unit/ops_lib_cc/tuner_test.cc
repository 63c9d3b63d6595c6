#include "core/tuner.h"

#include <array>
#include <string>

#include "check.h"

namespace {

// Runs `runs` times at what the way costs, and returns how many of them went way 1.
int RunAt(ddl::Tuner& tuner, int runs, std::array<double, 2> costs) {
  int second = 0;
  for (int run = 0; run < runs; ++run) {
    second += tuner.way();
    tuner.Ran(costs[tuner.way()]);
  }
  return second;
}

TEST(TunerTriesBothAndKeepsTheFaster) {
  for (const int faster : {0, 1}) {
    ddl::Tuner tuner;
    CHECK(RunAt(tuner, ddl::Tuner::kWindow, {2, 2}) == 0, "first the one");
    CHECK(RunAt(tuner, ddl::Tuner::kWindow, {2.0 + faster, 3.0 - faster}) == ddl::Tuner::kWindow,
          "then the other");
    const int runs = 100;
    CHECK(RunAt(tuner, runs, {2.0 + faster, 3.0 - faster}) == faster * runs, "then the faster");
  }
}

TEST(TunerLeavesAWayThatHasBecomeSlower) {
  ddl::Tuner tuner;
  RunAt(tuner, 50, {2, 3});
  CHECK(tuner.way() == 0, "the faster");
  CHECK(RunAt(tuner, ddl::Tuner::kWindow, {9, 3}) == 0, "until it has been slow for a window");
  CHECK(RunAt(tuner, 50, {9, 3}) == 50, "then the other");
}

TEST(TunerFindsOutThatTheOtherHasBecomeFaster) {
  ddl::Tuner tuner;
  RunAt(tuner, 50, {2, 8});
  CHECK(tuner.way() == 0, "the faster");
  // A trial at 8 for a run takes place every 64 * 4 * 8 of time.
  const int period = static_cast<int>(ddl::Tuner::kPatience) * ddl::Tuner::kWindow * 8 / 2;
  CHECK(RunAt(tuner, 2 * period, {2, 1}) >= period, "from a trial on");
  CHECK(tuner.way() == 1, "the faster now");
}

TEST(TunerSpendsLittleOnTrials) {
  ddl::Tuner tuner;
  constexpr int kRuns = 100'000;
  RunAt(tuner, 2 * ddl::Tuner::kWindow, {1, 7});
  const int trials = RunAt(tuner, kRuns, {1, 7});
  CHECK(trials > 0, "there are some");
  CHECK(trials * 7 < (kRuns - trials) / 60, std::to_string(trials));
}

TEST(TunerIsNotMisledByRunsThatOtherWorkDelays) {
  ddl::Tuner tuner;
  RunAt(tuner, 2 * ddl::Tuner::kWindow, {2, 3});
  // Fewer runs than bring a trial.
  for (int run = 0; run < 40; ++run) {
    CHECK(tuner.way() == 0, std::to_string(run));
    tuner.Ran(run % ddl::Tuner::kWindow == 0 ? 2 : 20);
  }
}

TEST(TunerDoesNotTakeTurnsBetweenWaysAlike) {
  ddl::Tuner tuner;
  RunAt(tuner, 2 * ddl::Tuner::kWindow, {2, 2});
  const int way = tuner.way();
  for (int run = 0; run < 200; ++run) {
    tuner.Ran(run % 2 == 0 ? 2.04 : 2.0);
    CHECK(tuner.way() == way, std::to_string(run));
  }
}

}  // namespace
