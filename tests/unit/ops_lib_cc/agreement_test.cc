#include "runtime/agreement.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "runtime/description.h"
#include "runtime/graph_runs.h"
#include "thread_communicator.h"

namespace {

using ddl::Action;
using ddl::Agreement;
using ddl::CancelledRun;
using ddl::Code;
using ddl::GraphRuns;
using ddl::HostGroup;
using ddl::Request;
using ddl::RequestQueue;
using ddl::Status;

Request Sum(const std::string& name, int64_t count, bool ordered = true, int64_t run = 0) {
  Request request;
  request.run = run;
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
        runs(&queue, std::chrono::hours(1)),
        agreement(&communicator, &queue, timeout_s) {}

  void Submit(Request request) {
    request.done = [this, name = request.name](const Status& status) {
      ended.push_back({name, status});
    };
    runs.Add(std::move(request));
  }

  // Agrees on what is to be next, until that is a collective or an error. `ran`: its name.
  // `meanwhile`: called while this rank lacks the choice.
  Status Next(std::string* ran, const std::function<void()>& meanwhile = {}) {
    while (true) {
      for (const CancelledRun& run : agreement.TakeCancelled()) runs.CancelElsewhere(run);
      if (!ended.empty()) {
        Status status = ended.front().second;
        *ran = ended.front().first;
        ended.pop_front();
        return status;
      }
      const Request* next = queue.Next(false);
      if (next == nullptr) {
        if (meanwhile) meanwhile();
        const Status status =
            queue.HasChoice() ? agreement.PollWhileMissing() : Status(Code::kInternal, "nothing");
        if (!status.ok()) return status;
        std::this_thread::yield();
        continue;
      }
      Action action;
      const Status status = agreement.Agree(*next, nullptr, &action);
      if (status.ok() && action.kind == Action::Kind::kRetry) continue;
      const Request taken = queue.Take();
      if (status.ok()) runs.Ran(taken.run);
      *ran = taken.name;
      return status;
    }
  }

  void MustRun(const std::string& name) {
    std::string ran;
    const Status status = Next(&ran);
    CHECK(status.ok() && ran == name, name + ", not " + ran + ": " + status.message());
  }

  void MustFail(const std::string& name, const std::string& words) {
    std::string ran;
    const Status status = Next(&ran);
    CHECK(status.code() == Code::kFailedPrecondition && ran == name, ran + status.message());
    CHECK(status.message().find(words) != std::string::npos, status.message());
  }

  // As the engine does with a request of a run that was cancelled here.
  void Cancel(const Request& request) {
    CancelledRun run = runs.Identify(request);
    run.reason = "rank " + std::to_string(communicator.rank()) + " has cancelled " + request.name;
    agreement.CancelRun(std::move(run));
    runs.Fail(request.run, Status(Code::kCancelled, ""));
    ended.clear();
  }

  ThreadCommunicator communicator;
  RequestQueue queue;
  GraphRuns runs;
  Agreement agreement;
  std::deque<std::pair<std::string, Status>> ended;  // what has failed with its run
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
      Request gradient = Sum("gradient", 5, round % 3 == 0, 10 * round + number);
      if (number == 1) {
        rank.Submit(gradient);
        rank.Cancel(gradient);
        CHECK(rank.agreement.HasCancelNotice(), "the others do not know");
        Request notice;
        notice.kind = Request::Kind::kCancelNotice;
        Action action;
        while (round % 2 == 1 &&
               rank.agreement.HasCancelNotice()) {  // or the next request tells them
          CHECK(rank.agreement.Agree(notice, nullptr, &action).ok(), "");
        }
      } else {
        rank.Submit(gradient);
        rank.MustFail("gradient", "rank 1 has cancelled gradient");
      }
      rank.queue.Add(Sum("gradient", 5));
      const Status next = rank.Next(&ran);
      CHECK(next.ok() && ran == "gradient", next.message());
      CHECK(!rank.agreement.HasCancelNotice(), "all know");
    }
    CHECK(rank.agreement.Leave().ok(), "");
  });
}

// Rank 1 learns that its run was cancelled when the run's last collective has run already.
TEST(WhatIsCancelledTooLateFailsTheRestOfThatRunAndNothingElse) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 5; ++step) {
      const int64_t run = 10 * step + number + 1;  // another number on each rank
      rank.Submit(Sum("loss", 1, step % 2 == 0, run));
      rank.MustRun("loss");
      if (number == 1) rank.Cancel(Sum("loss", 1, step % 2 == 0, run));
      if (number == 2) rank.Submit(Sum("more of it", 1, step % 2 == 0, run));
      if (number != 2) rank.Submit(Sum("metric", 1, true, run + 5));
      if (number == 2) {
        rank.MustFail("more of it", "rank 1 has cancelled loss");
        rank.Submit(Sum("metric", 1, true, run + 5));
      }
      rank.MustRun("metric");
      rank.Submit(Sum("loss", 1, true));
      rank.MustRun("loss");
    }
  });
}

TEST(WhatOneThreadCancelsLeavesThoseOfOthersAlone) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 5; ++step) {
      const auto from = [&](const std::string& thread, int64_t run) {
        Request request = Sum("step", 3, true, 100 * step + 10 * run + number);
        request.stream = thread;
        return request;
      };
      const bool late = step % 2 == 0;  // the others ask for it when they have heard
      if (number == 1) {
        rank.Submit(from("generator", 1));
        rank.Cancel(from("generator", 1));
      } else if (!late) {
        rank.Submit(from("generator", 1));
      }
      rank.Submit(from("discriminator", 2));
      if (number != 1 && !late) rank.MustFail("step", "rank 1 has cancelled step");
      rank.MustRun("step");
      if (number != 1 && late) {
        rank.Submit(from("generator", 1));
        rank.MustFail("step", "rank 1 has cancelled step");
      }
      rank.Submit(from("generator", 3));
      rank.MustRun("step");
    }
  });
}

// Rank 0 could ask for "second" of its next run, while rank 2 still has that of the cancelled one.
TEST(WhatMayBeOfACancelledRunIsHeldUntilItIsKnown) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 5; ++step) {
      const auto ask = [&](const std::string& name, int64_t run) {
        return Sum(name, 3, false, 100 * step + 10 * run + number);
      };
      if (number == 1) {
        rank.Submit(ask("first", 1));
        rank.Cancel(ask("first", 1));
      } else {
        rank.Submit(ask(number == 0 ? "first" : "second", 1));
        std::string ran;
        if (number == 0) rank.MustFail("first", "rank 1 has cancelled first");
        if (number == 2) {
          CHECK(rank.Next(&ran).code() == Code::kInternal, "it is held: " + ran);
          CHECK(rank.runs.HeldUntil().has_value(), "");
          rank.Submit(ask("first", 1));
          rank.MustFail("second", "rank 1 has cancelled first");
          rank.MustFail("first", "rank 1 has cancelled first");
        }
      }
      rank.Submit(ask("second", 2));
      rank.MustRun("second");
      rank.Submit(ask("first", 2));
      rank.MustRun("first");
    }
  });
}

TEST(WhatIsHeldFailsWhenNothingElseComesOrItsRankCancelsItToo) {
  RequestQueue queue(false);
  GraphRuns runs(&queue, std::chrono::hours(1));
  const auto take = [&] {
    (void)queue.Next(false);
    (void)queue.Take();
  };
  CancelledRun cancelled;
  cancelled.pending = {{{"AllReduce \"first\"", false, ""}, 0}};
  cancelled.reason = "rank 1 has cancelled it";
  for (const bool here : {false, true}) {
    runs.CancelElsewhere(cancelled);
    Status ended;
    Request second = Sum("second", 1, false, here ? 8 : 7);
    second.done = [&](const Status& status) { ended = status; };
    second.cancelled = std::make_shared<std::atomic<bool>>(here);
    runs.Add(second);
    CHECK(queue.empty() && runs.HeldUntil(), "it is not held");
    runs.Add(Sum("eager", 1, false));
    CHECK(!queue.empty(), "it is of no run");
    take();
    here ? runs.DropHeld() : runs.FailHeld();
    CHECK(ended.code() == (here ? Code::kCancelled : Code::kFailedPrecondition), ended.message());
    CHECK(!runs.HeldUntil(), "");
    runs.Add(Sum("first", 1, false, 9));
    CHECK(!queue.empty(), "a run fails once");
    take();
  }
  runs.CancelElsewhere(cancelled);
  runs.Ran(11);
  runs.Add(Sum("first", 1, false, 11));
  CHECK(!queue.empty(), "a run that has had a collective is not the cancelled one");
  take();
  runs.CancelElsewhere(cancelled);
  runs.Ran(12);
  runs.Add(Sum("second", 1, false, 12));
  CHECK(!queue.empty() && !runs.HeldUntil(), "nor can it be: it is not held");
  take();
  Request join;
  join.kind = Request::Kind::kJoin;
  runs.Add(join);
  Status refused;
  Request meanwhile = Sum("first", 1, false, 13);
  meanwhile.done = [&](const Status& status) { refused = status; };
  runs.Add(meanwhile);
  CHECK(queue.pending().size() == 1 && !refused.ok(), "a rank joins as a whole");
  take();
  runs.Add(Sum("first", 1, false, 14));
  CHECK(!queue.empty(), "the cancelled run ended here before it joined");
}

TEST(WhatIsHeldForOneRunMayBeOfAnotherThatWasCancelledAsWell) {
  RequestQueue queue(false);
  GraphRuns runs(&queue, std::chrono::hours(1));
  CancelledRun first, second;
  first.pending = {{{"AllReduce \"first\"", false, ""}, 0}};
  second.pending = {{{"AllReduce \"second\"", false, ""}, 0}};
  second.reason = "rank 1 has cancelled the second";
  Status ended;
  Request request = Sum("second", 1, false, 7);
  request.done = [&](const Status& status) { ended = status; };
  runs.CancelElsewhere(first);
  runs.Add(request);
  CHECK(queue.empty() && ended.ok(), "it is held");
  runs.CancelElsewhere(second);
  CHECK(ended.message().find(second.reason) != std::string::npos, ended.message());
  runs.Add(Sum("third", 1, false, 8));
  CHECK(queue.empty(), "it is held for the first");
  runs.AwaitNothing();
  CHECK(!queue.empty() && !runs.HeldUntil(), "");
}

TEST(RanksThatCancelTheSameRunFailNothingElse) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 6; ++step) {
      const bool ordered = step % 2 == 0;
      const auto ask = [&](const std::string& name, int64_t run) {
        return Sum(name, 3, ordered, 100 * step + 10 * run + number);
      };
      // Each has heard of another part of it; rank 2 of all.
      rank.Submit(ask(number == 1 && !ordered ? "second" : "first", 1));
      if (number > 0) rank.Submit(ask(number == 1 && !ordered ? "third" : "second", 1));
      if (number < 2) rank.Cancel(rank.queue.pending().front());
      if (number == 2) {
        rank.MustFail("first", "has cancelled");
        rank.MustFail("second", "has cancelled");
      }
      for (const char* name : {"first", "second", "third"}) {
        rank.Submit(ask(name, 2));
        rank.MustRun(name);
      }
      CHECK(!rank.agreement.HasCancelNotice(), "all know");
    }
  });
}

// What comes before it in its stream, and has not been cancelled, runs.
TEST(AnEarlierRequestOfTheStreamIsNotTakenForTheCancelledOne) {
  OnRanks(2, [](Rank& rank, int number) {
    rank.Submit(Sum("gradient", 3));
    rank.Submit(Sum("gradient", 3, true, 10 + number));
    if (number == 1) rank.Cancel(rank.queue.pending().back());
    if (number == 0) rank.MustFail("gradient", "rank 1 has cancelled gradient");
    rank.MustRun("gradient");
    rank.Submit(Sum("gradient", 3, true, 20 + number));
    rank.MustRun("gradient");
  });
}

// Rank 1 reports that it lacks "checked", then gets it: its proposal is under way when rank 0 drops
// its own.
TIMED_TEST(AProposalThatCrossesAResponseIsNotCountedInTheNextRound) {
  using std::chrono::milliseconds;
  for (const bool other : {false, true}) {
    Mailboxes mailboxes;
    mailboxes.takes = [](int from, int, const std::string& message) {
      if (from == 0) return milliseconds(0);
      const bool proposes = message.find("checked\n") != std::string::npos;
      return milliseconds(pace * (proposes ? 300 : message[0] == 'I' ? 100 : 0));
    };
    const auto run = [&](HostGroup& group) {
      const int number = group.rank();
      Rank rank(&group, &mailboxes, true, Paced(4));
      Request check = Sum("checked", 1, other);
      check.optional = true;
      std::string ran;
      rank.Submit(number == 0 ? check : Sum("average", 1, false));
      const auto begin = std::chrono::steady_clock::now();
      bool added = false;
      // After the report, which is due after a fourth of the limit and 5 s at most, and before it
      // arrives. Of an ordered stream what comes first takes the place of the choice.
      const auto late = begin + milliseconds(std::min(5000, pace * 1000) + pace * 30);
      const Status status = rank.Next(&ran, [&] {
        if (added || std::chrono::steady_clock::now() < late) return;
        added = true;
        if (other) rank.Submit(Sum("not checked", 1));
        rank.Submit(check);
      });
      if (number == 1 && other) {
        CHECK(status.ok() && ran == "average", ran + ": " + status.message());
        (void)rank.queue.Extract([](const Request& one) { return one.ordered; });
      } else {
        CHECK(status.code() == Code::kUnavailable, ran + ": " + status.message());
        if (ran.empty()) rank.queue.Follow({});
        usleep(static_cast<useconds_t>(pace * 300'000));
        if (number == 0) rank.Submit(Sum("average", 1, false));
        rank.MustRun("average");
      }
      for (int round = 0; round < 3; ++round) {  // in another order on each
        for (int i = 0; i < 2; ++i) rank.Submit(Sum(i == number ? "a" : "b", 1, false));
      }
      for (int round = 0; round < 6; ++round) {
        const Status next = rank.Next(&ran);
        CHECK(next.ok(), ran + ": " + next.message());
      }
      CHECK(mailboxes.Left() <= 1, std::to_string(mailboxes.Left()));
    };
    RunThreads(2, run, 4);
  }
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

TEST(TheLastToJoinIsNamedAlsoIfAllHaveToProposeAgain) {
  OnRanks(3, [](Rank& rank, int number) {
    if (number == 0) {
      rank.Submit(Sum("gradient", 5));
      rank.MustRun("gradient");
      rank.Submit(Sum("cancelled", 5, true, 7));
      rank.Cancel(rank.queue.pending().back());
    }
    Request join;
    join.kind = Request::Kind::kJoin;
    Action action;
    do {
      const Status status = rank.agreement.Agree(join, nullptr, &action);
      CHECK(status.ok(), status.message());
    } while (action.kind != Action::Kind::kAllJoined);
    CHECK(action.last_joined == 0, std::to_string(action.last_joined));
  });
}

TEST(TheLastToJoinIsNamedAlsoAfterAJoinThatFailed) {
  OnRanks(2, [](Rank& rank, int number) {
    Request join;
    join.kind = Request::Kind::kJoin;
    const auto joins = [&] {
      Action action;
      Status status;
      do {
        status = rank.agreement.Agree(join, nullptr, &action);
      } while (status.ok() && action.kind != Action::Kind::kAllJoined);
      CHECK(!status.ok() || action.last_joined == 0, std::to_string(action.last_joined));
      return status;
    };
    if (number == 0) {
      const Status status = joins();
      CHECK(status.code() == Code::kInvalidArgument, status.message());
    } else {
      rank.Submit(Sum("gradient", 5));
      rank.MustRun("gradient");
      Request broadcast = Sum("weights", 5);
      broadcast.kind = Request::Kind::kBroadcast;
      broadcast.op_name = "Bcast";
      rank.Submit(std::move(broadcast));
      std::string ran;
      const Status status = rank.Next(&ran);
      CHECK(status.code() == Code::kInvalidArgument, status.message());
    }
    if (number == 0) {
      rank.Submit(Sum("another", 5));
      rank.MustRun("another");
    }
    const Status status = joins();
    CHECK(status.ok(), status.message());
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
