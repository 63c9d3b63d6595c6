#include "algorithms/meeting.h"

#include <signal.h>
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

using ddl::Code;
using ddl::HostGroup;
using ddl::Met;
using ddl::Offer;
using ddl::Status;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Offer OfferOf(uint64_t digest, const char* title = "AllReduceN \"grads\"") {
  Offer offer;
  offer.digest[0] = digest;
  offer.title = [title] { return std::string(title); };
  return offer;
}

Status MeetFor(HostGroup& group, uint64_t digest) {
  Met met = Met::kDifferent;
  const Status status = ddl::Meet(&group, OfferOf(digest), &met);
  CHECK(!status.ok() || met == Met::kAlike, "digests are equal");
  return status;
}

void CheckError(const Status& status, Code code, const std::string& text) {
  CHECK(status.code() == code, std::to_string(static_cast<int>(status.code())) + status.message());
  CHECK(status.message().find(text) != std::string::npos, status.message());
}

template <typename T>
void SmallSums(HostGroup& group) {
  for (const int64_t count : {0, 1, 5, 10, 1000, static_cast<int>(ddl::kMaxOfferBytes / 8)}) {
    for (const bool in_place : {false, true}) {
      std::vector<T> values = ValuesOf<T>(count, group.rank(), group.size()), results(count);
      Offer offer = OfferOf(count);
      offer.in = values.data();
      offer.out = in_place ? values.data() : results.data();
      offer.count = count;
      offer.dtype = kDTypeOf<T>;
      offer.divisor = in_place ? group.size() : 1;
      Met met = Met::kDifferent;
      const Status status = ddl::Meet(&group, offer, &met);
      CHECK(status.ok() && met == Met::kAlike, status.message());
      CheckTotal(in_place ? values : results, group.size(), offer.divisor, "small");
    }
  }
}

TEST(SmallTensorsAreSummedOnTheWay) {
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

TEST(WhatIsTakenBackBeforeTheLastRankComesIsNotDoneOnAnyRank) {
  // Rank 0 shows its values and takes them back while rank 2 is missing, or at any other moment.
  std::atomic<int> taken{0}, held{0};
  for (int round = 0; round < 60; ++round) {
    std::atomic<bool> withdrawn{false};
    const bool surely = round < 3;
    std::vector<Met> ends(3, Met::kDifferent);
    RunThreads(3, [&](HostGroup& group) {
      const int rank = group.rank();
      std::vector<float> values(5, 1.0f), sums(5, 0.0f);
      Offer offer = OfferOf(1);
      offer.in = values.data();
      offer.out = sums.data();
      offer.count = 5;
      std::thread taker;
      if (rank == 0) {
        offer.withdrawn = &withdrawn;
        taker = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(surely ? 5 : round % 8 * 12));
          withdrawn = true;
        });
      }
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(surely ? 150 : 50));
      Status status = ddl::Meet(&group, offer, &ends[rank]);
      CHECK(status.ok(), status.message());
      const float want = ends[rank] == Met::kAlike ? 3.0f : 0.0f;
      for (const float sum : sums) CHECK(sum == want, std::to_string(sum));
      if (rank == 0) taker.join();
      CHECK(MeetFor(group, 2).ok(), "the group goes on");
    });
    CHECK(ends[0] == ends[1] && ends[0] == ends[2], "all come to the same end");
    CHECK(ends[0] != Met::kDifferent, "");
    CHECK(!surely || ends[0] == Met::kWithdrawn, "rank 2 came long after it");
    ++(ends[0] == Met::kWithdrawn ? taken : held);
  }
  CHECK(taken > 0 && held > 0, std::to_string(taken) + " and " + std::to_string(held));
}

TEST(DigestsThatDifferAreSeenByAllAndTheGroupGoesOn) {
  RunThreads(3, [](HostGroup& group) {
    std::vector<float> values(10, 1.0f), results(10, 7.0f);
    Offer offer = OfferOf(group.rank() == 1 ? 5 : 6);
    offer.in = values.data();
    offer.out = results.data();
    offer.count = 10;
    Met met = Met::kAlike;
    const Status status = ddl::Meet(&group, offer, &met);
    CHECK(status.ok() && met == Met::kDifferent, status.message());
    CHECK(results[0] == 7.0f, "nothing is summed");
    CHECK(MeetFor(group, 8).ok(), "");
  });
}

TEST(LeavingTogetherIsNoError) {
  RunThreads(
      3,
      [](HostGroup& group) {
        usleep(100'000 * group.rank());  // longer than the timeout in all
        Offer offer = OfferOf(0, "Leave");
        offer.leaving = true;
        Met met = Met::kDifferent;
        const Status status = ddl::Meet(&group, offer, &met);
        CHECK(status.ok() && met == Met::kAlike, status.message());
      },
      0.05);
}

TEST(RankThatLeavesFailsTheOthersAtOnce) {
  for (const int leaver : {0, 2}) {
    RunThreads(3, [leaver](HostGroup& group) {
      if (group.rank() == 1) usleep(1'200'000);
      const double start = Now();
      Offer offer = OfferOf(3);
      offer.leaving = group.rank() == leaver;
      if (offer.leaving) offer.title = [] { return std::string("Leave"); };
      Met met = Met::kDifferent;
      const Status status = ddl::Meet(&group, offer, &met);
      CHECK(Now() - start < 1.0, "not for as long as rank 1 is away");
      if (offer.leaving) return;
      CheckError(status, Code::kFailedPrecondition,
                 "AllReduceN \"grads\": rank " + std::to_string(leaver) +
                     " has already ended its script, but rank");
      CheckError(MeetFor(group, 4), Code::kFailedPrecondition, "already ended");
    });
  }
}

TEST(MissingRankIsNamedOnEveryRank) {
  for (const int late : {0, 1}) {
    RunThreads(
        3,
        [late](HostGroup& group) {
          if (group.rank() == late) usleep(1'500'000);
          const double start = Now();
          const std::string text = "rank " + std::to_string(late) + " did not come within 0.2 s";
          CheckError(MeetFor(group, 1), Code::kDeadlineExceeded, text);
          CHECK(Now() - start < 1.2, "");
          CheckError(MeetFor(group, 2), Code::kDeadlineExceeded, text);
        },
        0.2);
  }
}

TEST(ChainOfWaitsWithinTheLimitIsNoStall) {
  RunThreads(
      3,
      [](HostGroup& group) {
        usleep(250'000 * group.rank());
        const Status status = MeetFor(group, 1);
        CHECK(status.ok(), status.message());
      },
      0.4);
}

TEST(RanksThatGiveUpAndComeAtTheSameMomentAgreeOnTheEnd) {
  std::mt19937 random(5);
  int held = 0;
  for (int run = 0; run < 200; ++run) {
    Code ends[3];
    const int late_us = 9'000 + static_cast<int>(random() % 3'000);
    RunThreads(
        3,
        [&](HostGroup& group) {
          if (group.rank() == 1) usleep(late_us);
          ends[group.rank()] = MeetFor(group, 1).code();
        },
        0.01);
    CHECK(ends[0] == ends[1] && ends[1] == ends[2], "run " + std::to_string(run));
    held += ends[0] == Code::kOk;
  }
  std::printf("       %d of 200 met\n", held);
}

TEST(RankThatStopsInTheMiddleIsNamed) {
  RunThreads(
      2,
      [](HostGroup& group) {
        std::vector<float> values(1'000'000, 1.0f);
        if (group.rank() == 1) {
          usleep(1'500'000);
          return;
        }
        CheckError(ddl::AllReduceInPieces(&group, values.data(), values.data(), 1'000'000,
                                          ddl::DType::kFloat32, 1),
                   Code::kDeadlineExceeded, "rank 1 stopped in the middle of a collective");
        CheckError(MeetFor(group, 2), Code::kDeadlineExceeded, "rank 1 stopped");
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
  Offer offer = OfferOf(count);
  const bool small = count * static_cast<int64_t>(sizeof(T)) <= ddl::kMaxOfferBytes;
  if (small) {
    offer.in = values.data();
    offer.out = out;
    offer.count = count;
    offer.dtype = kDTypeOf<T>;
  }
  Met met = Met::kDifferent;
  DDL_RETURN_IF_ERROR(ddl::Meet(&group, offer, &met));
  CHECK(met == Met::kAlike, "");
  if (!small) {
    DDL_RETURN_IF_ERROR(
        ddl::AllReduceInPieces(&group, values.data(), out, count, kDTypeOf<T>, 1));
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
  for (const auto& [even, odd] : {std::pair{Stores::kCached, Stores::kStreamed},
                                  std::pair{Stores::kStreamed, Stores::kStreamed}}) {
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
          CheckError(MeetFor(group, 1), Code::kAborted, "has ended");
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
        usleep(1'000'000);
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
