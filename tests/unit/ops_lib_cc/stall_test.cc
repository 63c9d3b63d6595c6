// Ranks that stand still for longer than the limit, all of them: as in a container that is paused.

#include "core/stall.h"

#include <signal.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "algorithms/host_barrier.h"
#include "ranks.h"

namespace {

TIMED_TEST(AStallClockCountsNoTimeInWhichNobodyPolls) {
  ddl::StallClock clock;
  double waited_s = 0;
  for (int i = 0; i < 30; ++i) {
    usleep(10'000);
    waited_s = clock.Poll();
  }
  CHECK(waited_s > 0.29 && waited_s < Paced(0.6), ddl::Seconds(waited_s));
  usleep(400'000);
  const double after_s = clock.Poll();
  CHECK(after_s > waited_s + 0.09 && after_s < waited_s + 0.11, ddl::Seconds(after_s));
  clock.Restart();
  CHECK(clock.Poll() < Paced(0.05), "it began anew");
}

// Rank 0 waits for rank 1; both stand still; then rank 0 goes on first.
void WaitAndStandStill(const std::function<ddl::Status(ddl::HostGroup&)>& wait,
                       const std::function<void(ddl::HostGroup&)>& come) {
  constexpr double kLimitS = 0.6;
  SharedCount waiting, awake;
  RunProcesses(
      2,
      [&](ddl::HostGroup& group) {
        waiting.Add();
        if (group.rank() == 1) {
          awake.Await(1);
          return come(group);
        }
        const ddl::Status status = wait(group);
        CHECK(status.ok(), status.message());
      },
      Paced(kLimitS), -1,
      [&](const std::vector<pid_t>& ranks) {
        waiting.Await(2);
        SleepFor(0.05);
        for (const pid_t rank : ranks) kill(rank, SIGSTOP);
        SleepFor(2 * kLimitS);
        kill(ranks[0], SIGCONT);
        SleepFor(kLimitS / 4);
        kill(ranks[1], SIGCONT);
        awake.Add();
      });
}

TIMED_TEST(RanksThatStoodStillMeetAtABarrier) {
  const auto arrive = [](ddl::HostGroup& group) {
    ddl::BarrierResult result;
    return ddl::HostBarrier(&group, {}, &result);
  };
  WaitAndStandStill(arrive, [&](ddl::HostGroup& group) { (void)arrive(group); });
}

TIMED_TEST(RanksThatStoodStillGoOnWithACollective) {
  SharedCount published;
  WaitAndStandStill(
      [&](ddl::HostGroup& group) {
        return group.Await(1, [&published] { return published.count() > 0; });
      },
      [&](ddl::HostGroup& group) {
        published.Add();
        group.Notify();
        usleep(200'000);  // else it would have died
      });
}

}  // namespace
