#include "runtime/agreement.h"

#include <string>
#include <thread>
#include <vector>

#include "ranks.h"
#include "runtime/description.h"
#include "thread_communicator.h"

namespace {

using ddl::Action;
using ddl::Agreement;
using ddl::Code;
using ddl::HostGroup;
using ddl::Request;
using ddl::RequestQueue;
using ddl::Status;

Request Sum(const std::string& name, int64_t count, bool ordered = true) {
  Request request;
  request.op_name = "AllReduce";
  request.name = name;
  request.ordered = ordered;
  ddl::TensorBuffer buffer;
  buffer.count = count;
  buffer.dims = {count};
  request.tensors.push_back(buffer);
  return request;
}

// One rank's engine, as far as agreement goes.
struct Rank {
  Rank(HostGroup* group, Mailboxes* mailboxes, bool shares_memory, double timeout_s)
      : communicator(group, mailboxes, shares_memory),
        queue(false),
        agreement(&communicator, &queue, timeout_s) {}

  // Submits `request` and agrees on what is to be next, until that is a collective or an error.
  // `ran`: its name.
  Status Next(std::string* ran) {
    while (true) {
      const Request* next = queue.Next(false);
      if (next == nullptr) {
        const Status status = agreement.PollWhileMissing();
        if (!status.ok()) return status;
        std::this_thread::yield();
        continue;
      }
      Action action;
      const Status status = agreement.Agree(*next, nullptr, &action);
      if (status.ok() && action.kind == Action::Kind::kRetry) continue;
      *ran = queue.Take().name;
      return status;
    }
  }

  ThreadCommunicator communicator;
  RequestQueue queue;
  Agreement agreement;
};

// Each test over messages alone, and where ranks share memory.
void OnRanks(int size, const std::function<void(Rank&, int rank)>& function,
             double timeout_s = 60) {
  for (const bool shares_memory : {false, true}) {
    Mailboxes mailboxes;
    RunThreads(
        size,
        [&](HostGroup& group) {
          Rank rank(&group, &mailboxes, shares_memory, Paced(timeout_s));
          function(rank, group.rank());
        },
        timeout_s);
  }
}

TEST(RanksAgreeOnOneCollectiveAfterTheOther) {
  OnRanks(3, [](Rank& rank, int) {
    for (int step = 0; step < 20; ++step) {
      const std::string name = "step " + std::to_string(step);
      rank.queue.Add(Sum(name, 5));
      std::string ran;
      const Status status = rank.Next(&ran);
      CHECK(status.ok() && ran == name, status.message());
    }
    CHECK(rank.agreement.Leave().ok(), "");
  });
}

TEST(ADifferenceIsTheSameErrorOnEveryRankAndTheNextCollectiveRuns) {
  OnRanks(3, [](Rank& rank, int number) {
    rank.queue.Add(Sum("gradient", number == 2 ? 7 : 5));
    std::string ran;
    const Status status = rank.Next(&ran);
    CHECK(status.code() == Code::kInvalidArgument, status.message());
    for (const char* part : {"gradient", "rank 2", "[7]", "[5]"}) {
      CHECK(status.message().find(part) != std::string::npos, status.message());
    }
    rank.queue.Add(Sum("after", 1));
    CHECK(rank.Next(&ran).ok() && ran == "after", ran);
  });
}

TEST(UnorderedCollectivesRunInRankZerosOrder) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 10; ++step) {
      for (int i = 0; i < 3; ++i) {
        rank.queue.Add(Sum("op " + std::to_string((i + number) % 3), 4, false));
      }
      for (int i = 0; i < 3; ++i) {
        std::string ran;
        const Status status = rank.Next(&ran);
        CHECK(status.ok() && ran == "op " + std::to_string(i), ran + ": " + status.message());
      }
    }
  });
}

TEST(ARankThatLeavesIsAnErrorForThoseThatStayForEver) {
  OnRanks(3, [](Rank& rank, int number) {
    if (number == 1) {
      const Status told = rank.agreement.Leave();
      CHECK(told.code() == Code::kFailedPrecondition, told.message());
      return;
    }
    for (int times = 0; times < 2; ++times) {
      rank.queue.Add(Sum("gradient", 5));
      std::string ran;
      const Status status = rank.Next(&ran);
      CHECK(status.code() == Code::kFailedPrecondition, status.message());
      CHECK(status.message().find("rank 1 has already ended") != std::string::npos,
            status.message());
    }
  });
}

TEST(WhatIsOptionalIsDroppedWhereNotAllRanksAskForIt) {
  const auto run = [](Rank& rank, int number) {
    std::string ran;
    for (int callers = 1; callers < 3; ++callers) {
      if (number < callers) {
        Request check = Sum("check", 1, false);
        check.optional = true;
        rank.queue.Add(check);
        const Status status = rank.Next(&ran);
        CHECK(status.code() == Code::kUnavailable && ran == "check", status.message());
        const std::string part = "rank 2 waits for AllReduce \"average\" instead";
        CHECK(status.message().find(part) != std::string::npos, status.message());
      }
      rank.queue.Add(Sum("average", 1));
      Status status = rank.Next(&ran);
      if (number >= callers) {  // it waited for a choice that was dropped
        CHECK(status.code() == Code::kUnavailable, status.message());
        rank.queue.Follow({});
        status = rank.Next(&ran);
      }
      CHECK(status.ok() && ran == "average", status.message());
    }
    rank.queue.Add(Sum("after", 1));
    CHECK(rank.Next(&ran).ok() && ran == "after", ran);
  };
  OnRanks(3, run, 2);  // a rank reports after a fourth of it what it has pending
}

// Rank 0 pings, then learns that rank 2 waits for another one and drops its own; the answers to its
// ping arrive after that.
TIMED_TEST(AnAnswerToAnEarlierPingIsNotTakenForOne) {
  using std::chrono::milliseconds;
  Mailboxes mailboxes;
  mailboxes.takes = [](int from, int to, const std::string& message) {
    if (to != 0) return milliseconds(0);
    return milliseconds(pace * (message.size() == 1 ? 500 : from == 2 ? 250 : 0));
  };
  const auto run = [&](HostGroup& group) {
    Rank rank(&group, &mailboxes, false, Paced(4));  // it pings each second
    std::string ran;
    if (group.rank() < 2) {
      Request check = Sum("check", 1, false);
      check.optional = true;
      rank.queue.Add(check);
      const Status status = rank.Next(&ran);
      CHECK(status.code() == Code::kUnavailable && ran == "check", status.message());
    }
    rank.queue.Add(Sum("average", 1));
    Status status = rank.Next(&ran);
    if (group.rank() == 2) {
      CHECK(status.code() == Code::kUnavailable, status.message());
      rank.queue.Follow({});
      status = rank.Next(&ran);
    }
    CHECK(status.ok() && ran == "average", status.message());
  };
  RunThreads(3, run, 4);
}

TEST(AMismatchOfUnorderedRequestsIsTheirsAlone) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 5; ++step) {
      rank.queue.Add(Sum("free", number == 1 ? 7 : 5, false));
      std::string ran;
      const Status status = rank.Next(&ran);
      CHECK(status.code() == Code::kInvalidArgument && ran == "free", status.message());
      rank.queue.Add(Sum("after", 1, false));
      CHECK(rank.Next(&ran).ok() && ran == "after", ran);
    }
  });
}

// Rank 1 cancels its run while the others wait for it; each cancels its own, and the next one runs.
TEST(WhatOneRankCancelsFailsEverywhereAndTheNextRuns) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int round = 1; round <= 5; ++round) {
      std::string ran;
      if (number == 1) {
        rank.agreement.CancelRun("rank 1 has cancelled round " + std::to_string(round));
        CHECK(rank.agreement.HasCancelNotice(), "the others do not know");
        Request notice;
        notice.kind = Request::Kind::kCancelNotice;
        Action action;
        while (round % 2 == 1 &&
               rank.agreement.HasCancelNotice()) {  // or the next request tells them
          CHECK(rank.agreement.Agree(notice, nullptr, &action).ok(), "");
        }
      } else {
        rank.queue.Add(Sum("gradient", 5, round % 3 == 0));
        const Status status = rank.Next(&ran);
        CHECK(status.code() == Code::kFailedPrecondition && ran == "gradient", status.message());
        const std::string part = "rank 1 has cancelled round " + std::to_string(round);
        CHECK(status.message().find(part) != std::string::npos, status.message());
      }
      rank.queue.Add(Sum("gradient", 5));
      const Status next = rank.Next(&ran);
      CHECK(next.ok() && ran == "gradient", next.message());
      CHECK(!rank.agreement.HasCancelNotice(), "all know");
    }
    CHECK(rank.agreement.Leave().ok(), "");
  });
}

TEST(RanksThatJoinHearWhatTheOthersRun) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::string ran;
      Action action;
      const int steps = (number + epoch) % 3;  // that this rank has data for
      for (int step = 0; step < steps; ++step) {
        rank.queue.Add(Sum("gradient", 5, epoch > 0));
        const Status status = rank.Next(&ran);
        CHECK(status.ok() && ran == "gradient", status.message());
      }
      Request join;
      join.kind = Request::Kind::kJoin;
      int heard = 0;
      do {
        const Status status = rank.agreement.Agree(join, nullptr, &action);
        CHECK(status.ok(), status.message());
        if (action.kind != Action::Kind::kRun) continue;
        ++heard;
        CHECK(action.contributors == 3 - steps - heard, std::to_string(action.contributors));
        CHECK(ddl::Title(action.description) == "AllReduce \"gradient\"", action.description);
      } while (action.kind != Action::Kind::kAllJoined);
      CHECK(heard == 2 - steps, std::to_string(heard));
      CHECK(action.last_joined == (5 - epoch) % 3, std::to_string(action.last_joined));
    }
  });
}

TIMED_TEST(ARankThatDoesNotComeIsNamed) {
  OnRanks(
      3,
      [](Rank& rank, int number) {
        if (number == 2) return;
        rank.queue.Add(Sum("gradient", 5));
        std::string ran;
        const Status status = rank.Next(&ran);
        CHECK(status.code() == Code::kDeadlineExceeded || status.code() == Code::kAborted,
              status.message());
        CHECK(status.message().find("rank 2") != std::string::npos, status.message());
      },
      0.3);
}

}  // namespace
