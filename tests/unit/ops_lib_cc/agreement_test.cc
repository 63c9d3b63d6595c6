#include "runtime/agreement.h"

#include <string>
#include <thread>
#include <vector>

#include "ranks.h"
#include "thread_communicator.h"

namespace {

using ddl::Accord;
using ddl::Agreement;
using ddl::Code;
using ddl::HostGroup;
using ddl::Negotiator;
using ddl::Request;
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
  Rank(HostGroup* group, Mailboxes* mailboxes, bool meets, double timeout_s)
      : communicator(group, mailboxes, meets),
        negotiator(false),
        agreement(&communicator, &negotiator, timeout_s) {}

  // Submits `request` and agrees on what is to be shown, until that is a collective or an error.
  // `ran`: its name.
  Status Next(std::string* ran) {
    while (true) {
      const Request* shown = negotiator.Show(false);
      if (shown == nullptr) {
        const Status status = agreement.Lack();
        if (!status.ok()) return status;
        std::this_thread::yield();
        continue;
      }
      Accord accord;
      const Status status = agreement.Agree(*shown, nullptr, &accord);
      if (status.ok() && accord == Accord::kAnotherFirst) continue;
      *ran = negotiator.Take().name;
      return status;
    }
  }

  ThreadCommunicator communicator;
  Negotiator negotiator;
  Agreement agreement;
};

// Each test over messages alone, and where ranks meet.
void OnRanks(int size, const std::function<void(Rank&, int rank)>& function,
             double timeout_s = 60) {
  for (const bool meets : {false, true}) {
    Mailboxes mailboxes;
    RunThreads(
        size,
        [&](HostGroup& group) {
          Rank rank(&group, &mailboxes, meets, timeout_s);
          function(rank, group.rank());
        },
        timeout_s);
  }
}

TEST(RanksAgreeOnOneCollectiveAfterTheOther) {
  OnRanks(3, [](Rank& rank, int) {
    for (int step = 0; step < 20; ++step) {
      const std::string name = "step " + std::to_string(step);
      rank.negotiator.Add(Sum(name, 5));
      std::string ran;
      const Status status = rank.Next(&ran);
      CHECK(status.ok() && ran == name, status.message());
    }
    CHECK(rank.agreement.Leave().ok(), "");
  });
}

TEST(ADifferenceIsTheSameErrorOnEveryRankAndTheNextCollectiveRuns) {
  OnRanks(3, [](Rank& rank, int number) {
    rank.negotiator.Add(Sum("gradient", number == 2 ? 7 : 5));
    std::string ran;
    const Status status = rank.Next(&ran);
    CHECK(status.code() == Code::kInvalidArgument, status.message());
    for (const char* part : {"gradient", "rank 2", "[7]", "[5]"}) {
      CHECK(status.message().find(part) != std::string::npos, status.message());
    }
    rank.negotiator.Add(Sum("after", 1));
    CHECK(rank.Next(&ran).ok() && ran == "after", ran);
  });
}

TEST(UnorderedCollectivesRunInRankZerosOrder) {
  OnRanks(3, [](Rank& rank, int number) {
    for (int step = 0; step < 10; ++step) {
      for (int i = 0; i < 3; ++i) {
        rank.negotiator.Add(Sum("op " + std::to_string((i + number) % 3), 4, false));
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
      rank.negotiator.Add(Sum("gradient", 5));
      std::string ran;
      const Status status = rank.Next(&ran);
      CHECK(status.code() == Code::kFailedPrecondition, status.message());
      CHECK(status.message().find("rank 1 has already ended") != std::string::npos,
            status.message());
    }
  });
}

TEST(ARankThatDoesNotComeIsNamed) {
  OnRanks(
      3,
      [](Rank& rank, int number) {
        if (number == 2) return;
        rank.negotiator.Add(Sum("gradient", 5));
        std::string ran;
        const Status status = rank.Next(&ran);
        CHECK(status.code() == Code::kDeadlineExceeded || status.code() == Code::kAborted,
              status.message());
        CHECK(status.message().find("rank 2") != std::string::npos, status.message());
      },
      0.3);
}

}  // namespace
