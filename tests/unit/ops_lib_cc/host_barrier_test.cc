#include "algorithms/host_barrier.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/pieces.h"
#include "algorithms/store_choice.h"
#include "ranks.h"
#include "values.h"

namespace {

using ddl::Arrival;
using ddl::BarrierResult;
using ddl::Code;
using ddl::HostGroup;
using ddl::Status;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Arrival ArrivalOf(uint64_t digest, const char* title = "AllReduceN \"grads\"") {
  Arrival arrival;
  arrival.digest[0] = digest;
  arrival.title = [title] { return std::string(title); };
  return arrival;
}

Status BarrierFor(HostGroup& group, uint64_t digest) {
  BarrierResult result = BarrierResult::kMismatch;
  const Status status = ddl::HostBarrier(&group, ArrivalOf(digest), &result);
  CHECK(!status.ok() || result == BarrierResult::kMatch, "digests are equal");
  return status;
}

void CheckError(const Status& status, Code code, const std::string& text) {
  CHECK(status.code() == code, std::to_string(static_cast<int>(status.code())) + status.message());
  CHECK(status.message().find(text) != std::string::npos, status.message());
}

template <typename T>
void SmallSums(HostGroup& group) {
  for (const int64_t count : {0, 1, 5, 10, 1000, static_cast<int>(ddl::kMaxInlineBytes / 8)}) {
    for (const bool in_place : {false, true}) {
      std::vector<T> values = ValuesOf<T>(count, group.rank(), group.size()), results(count);
      Arrival arrival = ArrivalOf(count);
      arrival.in = values.data();
      arrival.out = in_place ? values.data() : results.data();
      arrival.count = count;
      arrival.dtype = kDTypeOf<T>;
      arrival.reduction = in_place ? group.size() : 1;
      BarrierResult result = BarrierResult::kMismatch;
      const Status status = ddl::HostBarrier(&group, arrival, &result);
      CHECK(status.ok() && result == BarrierResult::kMatch, status.message());
      CheckTotal(in_place ? values : results, group.size(), arrival.reduction.divisor, "small");
    }
  }
}

TEST(SmallTensorsAreReducedInline) {
  for (int size = 1; size <= 9; ++size) {
    RunThreads(size, [](HostGroup& group) {
      SmallSums<float>(group);
      SmallSums<double>(group);
      SmallSums<int32_t>(group);
      SmallSums<int64_t>(group);
    });
  }
  RunProcesses(3, SmallSums<float>);
}

TEST(WhatIsCancelledBeforeTheLastArrivalIsNotDoneOnAnyRank) {
  // Rank 0 arrives and cancels while rank 2 is missing, or at any other moment.
  std::atomic<int> cancellations{0}, completed{0};
  for (int round = 0; round < 60; ++round) {
    std::atomic<bool> cancelled{false};
    const bool surely = round < 3;
    std::vector<BarrierResult> ends(3, BarrierResult::kMismatch);
    RunThreads(3, [&](HostGroup& group) {
      const int rank = group.rank();
      std::vector<float> values(5, 1.0f), sums(5, 0.0f);
      Arrival arrival = ArrivalOf(1);
      arrival.in = values.data();
      arrival.out = sums.data();
      arrival.count = 5;
      std::thread canceller;
      if (rank == 0) {
        arrival.cancelled = &cancelled;
        canceller = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(surely ? 5 : round % 8 * 12));
          cancelled = true;
        });
      }
      if (rank == 2 && surely) {
        // The group's first barrier.
        const std::atomic<uint64_t>& state = group.slot(0, 1).state;
        while (!(state.load() & HostGroup::kCancelled)) usleep(1'000);
      } else if (rank == 2) {
        usleep(50'000);
      }
      Status status = ddl::HostBarrier(&group, arrival, &ends[rank]);
      CHECK(status.ok(), status.message());
      const float want = ends[rank] == BarrierResult::kMatch ? 3.0f : 0.0f;
      for (const float sum : sums) CHECK(sum == want, std::to_string(sum));
      if (rank == 0) canceller.join();
      CHECK(BarrierFor(group, 2).ok(), "the group goes on");
    });
    CHECK(ends[0] == ends[1] && ends[0] == ends[2], "all come to the same end");
    CHECK(ends[0] != BarrierResult::kMismatch, "");
    CHECK(!surely || ends[0] == BarrierResult::kCancelled, "rank 2 arrived after it");
    ++(ends[0] == BarrierResult::kCancelled ? cancellations : completed);
  }
  CHECK(cancellations > 0 && completed > 0,
        std::to_string(cancellations) + " and " + std::to_string(completed));
}

TEST(DigestsThatDifferAreSeenByAllAndTheGroupGoesOn) {
  RunThreads(3, [](HostGroup& group) {
    std::vector<float> values(10, 1.0f), results(10, 7.0f);
    Arrival arrival = ArrivalOf(group.rank() == 1 ? 5 : 6);
    arrival.in = values.data();
    arrival.out = results.data();
    arrival.count = 10;
    BarrierResult result = BarrierResult::kMatch;
    const Status status = ddl::HostBarrier(&group, arrival, &result);
    CHECK(status.ok() && result == BarrierResult::kMismatch, status.message());
    CHECK(results[0] == 7.0f, "nothing is summed");
    CHECK(BarrierFor(group, 8).ok(), "");
  });
}

TIMED_TEST(LeavingTogetherIsNoError) {
  RunThreads(
      3,
      [](HostGroup& group) {
        SleepFor(0.1 * group.rank());  // longer than the timeout in all
        Arrival arrival = ArrivalOf(0, "Leave");
        arrival.leaving = true;
        BarrierResult result = BarrierResult::kMismatch;
        const Status status = ddl::HostBarrier(&group, arrival, &result);
        CHECK(status.ok() && result == BarrierResult::kMatch, status.message());
      },
      0.05);
}

TIMED_TEST(RankThatLeavesFailsTheOthersAtOnce) {
  for (const int leaver : {0, 2}) {
    RunThreads(3, [leaver](HostGroup& group) {
      if (group.rank() == 1) SleepFor(1.2);
      const double start = Now();
      Arrival arrival = ArrivalOf(3);
      arrival.leaving = group.rank() == leaver;
      if (arrival.leaving) arrival.title = [] { return std::string("Leave"); };
      BarrierResult result = BarrierResult::kMismatch;
      const Status status = ddl::HostBarrier(&group, arrival, &result);
      CHECK(Now() - start < Paced(1.0), "not for as long as rank 1 is away");
      if (arrival.leaving) return;
      CheckError(status, Code::kFailedPrecondition,
                 "AllReduceN \"grads\": rank " + std::to_string(leaver) +
                     " has already ended its script, but rank");
      CheckError(BarrierFor(group, 4), Code::kFailedPrecondition, "already ended");
    });
  }
}

TIMED_TEST(MissingRankIsNamedOnEveryRank) {
  for (const int late : {0, 1}) {
    RunThreads(
        3,
        [late](HostGroup& group) {
          if (group.rank() == late) SleepFor(1.5);
          const double start = Now();
          const std::string text = "rank " + std::to_string(late) + " did not come within " +
                                   (pace == 1 ? "0.2 s" : "");
          CheckError(BarrierFor(group, 1), Code::kDeadlineExceeded, text);
          CHECK(Now() - start < Paced(1.2), "");
          CheckError(BarrierFor(group, 2), Code::kDeadlineExceeded, text);
        },
        0.2);
  }
}

TIMED_TEST(ChainOfWaitsWithinTheLimitIsNoStall) {
  RunThreads(
      3,
      [](HostGroup& group) {
        SleepFor(0.25 * group.rank());
        const Status status = BarrierFor(group, 1);
        CHECK(status.ok(), status.message());
      },
      0.4);
}

TEST(RanksThatGiveUpAndArriveAtTheSameMomentAgreeOnTheEnd) {
  std::mt19937 random(5);
  int completed = 0;
  for (int run = 0; run < 200; ++run) {
    Code ends[3];
    const int late_us = 9'000 + static_cast<int>(random() % 3'000);
    RunThreads(
        3,
        [&](HostGroup& group) {
          if (group.rank() == 1) usleep(late_us);
          ends[group.rank()] = BarrierFor(group, 1).code();
        },
        0.01);
    CHECK(ends[0] == ends[1] && ends[1] == ends[2], "run " + std::to_string(run));
    completed += ends[0] == Code::kOk;
  }
  std::printf("       %d of 200 completed\n", completed);
}

TIMED_TEST(RankThatStopsInTheMiddleIsNamed) {
  RunThreads(
      2,
      [](HostGroup& group) {
        std::vector<float> values(1'000'000, 1.0f);
        if (group.rank() == 1) {
          SleepFor(1.5);
          return;
        }
        CheckError(ddl::AllReduceInPieces(&group, values.data(), values.data(), 1'000'000,
                                          ddl::DType::kFloat32, 1),
                   Code::kDeadlineExceeded, "rank 1 stopped in the middle of a collective");
        CheckError(BarrierFor(group, 2), Code::kDeadlineExceeded, "rank 1 stopped");
      },
      0.2);
}

// How often a test tries: more often where a person asks for it.
int64_t Times(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoll(text);
}

template <typename T>
Status Work(HostGroup& group, int64_t count, bool in_place) {
  std::vector<T> values = ValuesOf<T>(count, group.rank(), group.size()), results(count);
  T* out = in_place ? values.data() : results.data();
  Arrival arrival = ArrivalOf(count);
  const bool small = count * static_cast<int64_t>(sizeof(T)) <= ddl::kMaxInlineBytes;
  if (small) {
    arrival.in = values.data();
    arrival.out = out;
    arrival.count = count;
    arrival.dtype = kDTypeOf<T>;
  }
  BarrierResult result = BarrierResult::kMismatch;
  DDL_RETURN_IF_ERROR(ddl::HostBarrier(&group, arrival, &result));
  CHECK(result == BarrierResult::kMatch, "");
  if (!small) {
    DDL_RETURN_IF_ERROR(ddl::AllReduceInPieces(&group, values.data(), out, count, kDTypeOf<T>, 1));
  }
  CheckTotal(in_place ? values : results, group.size(), 1, "work");
  return Status();
}

// Collectives of random sizes and dtypes until something fails. Every result must be right.
Status WorkForEver(HostGroup& group, int64_t steps = INT64_MAX, int largest = 20) {
  std::mt19937 random(7);  // the same on all ranks
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t count = (int64_t{1} << random() % largest) + random() % 3;
    const bool in_place = random() % 2 == 0;
    switch (random() % 4) {
      case 0: DDL_RETURN_IF_ERROR(Work<float>(group, count, in_place)); break;
      case 1: DDL_RETURN_IF_ERROR(Work<double>(group, count, in_place)); break;
      case 2: DDL_RETURN_IF_ERROR(Work<int32_t>(group, count, in_place)); break;
      default: DDL_RETURN_IF_ERROR(Work<int64_t>(group, count, in_place)); break;
    }
  }
  return Status();
}

// Ranks may differ: the choice reaches them at different times.
TEST(SumsAreRightWhateverStoresWriteThem) {
  using Stores = ddl::StoreChoice::Stores;
  for (const auto& [even, odd] : {std::pair{Stores::kCached, Stores::kNonTemporal},
                                  std::pair{Stores::kNonTemporal, Stores::kNonTemporal}}) {
    RunThreads(3, [even = even, odd = odd](HostGroup& group) {
      ddl::StoreChoice(&group).Use(group.rank() % 2 == 0 ? even : odd);
      const Status status = WorkForEver(group, 100, 14);
      CHECK(status.ok(), status.message());
    });
  }
}

TEST(RandomCollectivesOneAfterTheOtherAreRight) {
  for (const int size : {2, 3}) {
    RunProcesses(size, [](HostGroup& group) {
      const Status status = WorkForEver(group, Times("DDL_TEST_SOAK", 500), 15);
      CHECK(status.ok(), status.message());
    });
  }
}

TEST(KilledRankIsAnErrorOnTheOthersAtAnyMoment) {
  std::mt19937 random(3);
  for (int run = 0; run < Times("DDL_TEST_KILLS", 12); ++run) {
    const int size = 2 + run % 2, victim = run % size;
    double killed = 0;
    SharedCount joined;  // one that dies before is missing, not dead
    RunProcesses(
        size,
        [&, victim](HostGroup& group) {
          joined.Add();
          const Status status = WorkForEver(group);
          CheckError(status, Code::kAborted, "rank " + std::to_string(victim) + " has ended");
          CheckError(BarrierFor(group, 1), Code::kAborted, "has ended");
        },
        60, victim,
        [&](const std::vector<pid_t>& ranks) {
          joined.Await(size);
          usleep(random() % 60'000);
          kill(ranks[victim], SIGKILL);
          killed = Now();
        });
    CHECK(Now() - killed < 5, "it took " + std::to_string(Now() - killed) + " s");
  }
}

TEST(StoppedRankIsAnErrorOnTheOthers) {
  RunProcesses(
      2,
      [](HostGroup& group) {
        const Status status = WorkForEver(group);
        if (group.rank() == 0) CheckError(status, Code::kDeadlineExceeded, "rank 1 ");
      },
      0.3, 1,
      [](const std::vector<pid_t>& ranks) {
        usleep(50'000);
        kill(ranks[1], SIGSTOP);
        // Not before the other has noticed: a busy machine lets it wait for longer than its limit.
        siginfo_t ended;
        waitid(P_PID, static_cast<id_t>(ranks[0]), &ended, WEXITED | WNOWAIT);
        kill(ranks[1], SIGKILL);
      });
}

// The litmus test "store buffering": without the fence both ranks often miss what the other stored.
TEST(AFenceShowsWhatWasStoredBeforeItLooks) {
  constexpr int kRuns = 20'000;
  struct alignas(ddl::HostGroup::kLineBytes) Cell {
    std::atomic<int> stored{0};
  };
  std::vector<Cell> cells(2 * kRuns);
  std::vector<int> seen(2 * kRuns);
  std::atomic<int> arrived[2] = {};
  RunThreads(2, [&](ddl::HostGroup& group) {
    const int rank = group.rank(), other = 1 - rank;
    for (int run = 0; run < kRuns; ++run) {
      arrived[rank].store(run + 1);
      while (arrived[other].load() <= run) std::this_thread::yield();
      cells[2 * run + rank].stored.store(1, std::memory_order_release);
      group.Fence();
      seen[2 * run + rank] = cells[2 * run + other].stored.load();
    }
  });
  int missed = 0;
  for (int run = 0; run < kRuns; ++run) missed += seen[2 * run] + seen[2 * run + 1] == 0;
  CHECK(missed == 0, std::to_string(missed));
}

}  // namespace
