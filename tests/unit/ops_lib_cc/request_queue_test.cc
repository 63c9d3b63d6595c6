#include "runtime/request_queue.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "check.h"
#include "runtime/description.h"
#include "runtime/proposal.h"

using ddl::CancelledRun;
using ddl::Decision;
using ddl::Proposal;
using ddl::Request;
using ddl::RequestId;
using ddl::RequestQueue;

namespace {

Request Ask(const std::string& name, bool ordered = false, int64_t count = 3) {
  Request request;
  request.op_name = "AllReduce";
  request.name = name;
  request.ordered = ordered;
  request.tensors.push_back({nullptr, nullptr, count, {count}});
  return request;
}

RequestId At(const std::string& name, bool ordered = false) {
  return {Title(Ask(name)), ordered, ""};
}

Request From(const std::string& stream, const std::string& name) {
  Request request = Ask(name, true);
  request.stream = stream;
  return request;
}

Proposal Proposed(const Request& request, const std::vector<CancelledRun>& cancelled = {}) {
  Proposal proposal;
  proposal.kind = request.ordered ? Proposal::Kind::kOrdered : Proposal::Kind::kUnordered;
  proposal.description = Describe(request);
  proposal.cancelled = cancelled;
  return proposal;
}

Proposal Joined(bool now = false) {
  Proposal proposal;
  proposal.kind = Proposal::Kind::kJoin;
  proposal.newly_joined = now;
  return proposal;
}

Decision Decided(const std::vector<Request>& fronts) {
  std::vector<Proposal> proposals;
  for (const Request& front : fronts) proposals.push_back(Proposed(front));
  return ddl::Decide(proposals);
}

std::string NextName(RequestQueue* queue, bool wait_for_expected = false) {
  const Request* next = queue->Next(wait_for_expected);
  return next == nullptr ? "nothing" : next->name;
}

std::string Taken(RequestQueue* queue) { return queue->Take().name; }

std::string Sequence(const std::vector<RequestId>& order) {
  std::string text;
  for (const RequestId& id : order) text += id.title + (id.ordered ? "! " : " ");
  return text;
}

// Runs until all ranks are through, as the engine does; says in how many rounds they differed.
int RunAll(std::vector<RequestQueue>* ranks, std::vector<std::string>* ran) {
  int negotiations = 0;
  while (!(*ranks)[0].empty()) {
    std::vector<Proposal> proposals;
    for (RequestQueue& rank : *ranks) {
      const Request* next = rank.Next(/*wait_for_expected=*/false);
      CHECK(next != nullptr, "a rank has nothing to propose");
      if (next == nullptr) return -1;
      proposals.push_back(Proposed(*next));
    }
    const Decision decision = ddl::Decide(proposals);
    CHECK(decision.kind != Decision::Kind::kFail, decision.status.message());
    if (decision.kind == Decision::Kind::kReorder) {
      ++negotiations;
      const std::vector<RequestId> order = (*ranks)[0].Order();
      for (RequestQueue& rank : *ranks) rank.Follow(order);
      continue;
    }
    ran->push_back((*ranks)[0].Take().name);
    for (size_t i = 1; i < ranks->size(); ++i) {
      CHECK(Taken(&(*ranks)[i]) == ran->back(), "another one than rank 0's");
    }
  }
  for (const RequestQueue& rank : *ranks) CHECK(rank.empty(), "something is left");
  return negotiations;
}

}  // namespace

TEST(OrderedRequestsKeepTheirOrderAndNobodyWaits) {
  RequestQueue queue(false);
  CHECK(NextName(&queue) == "nothing", "");
  for (const char* name : {"a", "b", "a"}) queue.Add(Ask(name, true));
  for (const char* name : {"a", "b", "a"}) {
    CHECK(NextName(&queue, true) == name, name);
    CHECK(Taken(&queue) == name, name);
  }
  queue.Add(Ask("c", true));  // b came after a the last time, and nothing else is free
  CHECK(NextName(&queue, true) == "c", "");
}

TEST(AloneNobodyWaits) {
  RequestQueue queue(true);
  for (const char* name : {"a", "b", "a", "c"}) {
    queue.Add(Ask(name));
    CHECK(NextName(&queue, true) == name, name);
    CHECK(Taken(&queue) == name, name);
  }
}

TEST(ChoiceOfRank0OvertakesAndIsAwaited) {
  RequestQueue queue(false);
  queue.Add(Ask("a"));
  queue.Add(Ask("b"));
  CHECK(NextName(&queue) == "a", "");
  queue.Follow({At("c"), At("b")});
  CHECK(queue.HasChoice() && queue.choice().title == "AllReduce \"c\"", "");
  CHECK(NextName(&queue) == "nothing", "");
  queue.Add(Ask("c"));
  CHECK(NextName(&queue) == "c", "");
  CHECK(Taken(&queue) == "c", "");
  CHECK(!queue.HasChoice(), "");
  CHECK(NextName(&queue) == "b", "rank 0 has told that b comes next");
  CHECK(Taken(&queue) == "b", "");
  CHECK(NextName(&queue) == "a", "");
}

TEST(ChoiceCanBeDropped) {
  RequestQueue queue(false);
  queue.Add(Ask("a"));
  queue.Follow({At("c")});
  CHECK(NextName(&queue) == "nothing", "");
  queue.Follow({});
  CHECK(!queue.HasChoice() && NextName(&queue) == "a", "");
}

TEST(OrderedRequestIsNotOvertakenByAnother) {
  RequestQueue queue(false);
  queue.Add(Ask("free"));
  queue.Add(Ask("first", true));
  queue.Add(Ask("second", true));
  queue.Follow({At("second", true)});
  CHECK(NextName(&queue) == "first", "the mismatch has to show");
  queue.Follow({At("free")});
  CHECK(NextName(&queue) == "free", "");
  CHECK(Sequence(queue.Order()) == "AllReduce \"free\" AllReduce \"first\"! AllReduce \"second\"! ",
        Sequence(queue.Order()));
}

TEST(RequestsOfOneNameTakeTurns) {
  RequestQueue queue(false);
  for (int64_t count : {1, 2, 3}) {
    queue.Add(Ask("a", false, count));
    queue.Add(Ask("b", false, count));
  }
  for (int64_t count : {1, 2, 3}) {
    queue.Follow({At("b")});
    CHECK(queue.Next(false)->tensors[0].count == count, std::to_string(count));
    CHECK(Taken(&queue) == "b", "");
  }
}

TEST(IterationsOfALoopAreToldApart) {
  RequestQueue queue(false);
  for (const char* iteration : {" iteration 2", " iteration 1"}) {
    queue.Add(Ask("a"));
    queue.Add(Ask("a"));
    Request request = Ask("a");
    request.instance = iteration;
    queue.Add(std::move(request));
  }
  queue.Follow({{"AllReduce \"a iteration 1\"", false, ""}});
  CHECK(queue.Next(false)->instance == " iteration 1", "");
}

TEST(WhatCameNextIsExpectedForAWhile) {
  RequestQueue queue(false);
  for (const char* name : {"a", "b", "c", "a"}) {
    queue.Add(Ask(name));
    CHECK(NextName(&queue) == name && Taken(&queue) == name, name);
  }
  queue.Add(Ask("c"));
  CHECK(NextName(&queue, true) == "nothing", "b came after a");
  CHECK(NextName(&queue) == "c", "but c is there");
  queue.Add(Ask("b"));
  CHECK(NextName(&queue, true) == "b", "");
  CHECK(Taken(&queue) == "b", "");
  CHECK(NextName(&queue, true) == "c" && Taken(&queue) == "c", "");
}

TEST(RanksAgreeOnceHoweverTheirOrderDiffers) {
  std::mt19937 random(7);
  for (int size : {2, 3, 5}) {
    std::vector<RequestQueue> ranks(size, RequestQueue(false));
    int negotiations = 0, most_later = 0;
    for (int step = 0; step < 50; ++step) {
      std::vector<std::string> ran;
      for (RequestQueue& rank : ranks) {
        // Gradients in order, and losses and metrics that cross them and each other.
        std::vector<std::string> names = {"loss", "metric", "rows", "norm", "count"};
        std::shuffle(names.begin(), names.end(), random);
        for (const char* gradient : {"g0", "g1", "g2"}) {
          rank.Add(Ask(gradient, true));
          if (random() % 2 == 0 && names.size() > 1) {
            rank.Add(Ask(names.back()));
            names.pop_back();
          }
        }
        for (const std::string& name : names) rank.Add(Ask(name));
      }
      const int now = RunAll(&ranks, &ran);
      CHECK(ran.size() == 8, std::to_string(ran.size()));
      negotiations += now;
      // What comes after the last one of a step is seen at the second step.
      if (step > 1) most_later = std::max(most_later, now);
    }
    CHECK(negotiations > 0, "the orders were the same by chance");
    CHECK(most_later == 0, "negotiated again: " + std::to_string(most_later));
  }
}

TEST(DifferencesThatAreNotOfOrderAreErrors) {
  using Kind = Decision::Kind;
  CHECK(Decided({Ask("a"), Ask("a"), Ask("a", true)}).kind == Kind::kRun, "");
  CHECK(Decided({Ask("a"), Ask("a"), Ask("b", true)}).kind == Kind::kReorder, "");
  CHECK(Decided({Ask("a", true), Ask("b")}).kind == Kind::kReorder, "");
  Decision decision = Decided({Ask("a"), Ask("a", false, 4)});
  CHECK(decision.kind == Kind::kFail, "");
  CHECK(decision.status.code() == ddl::Code::kInvalidArgument, decision.status.message());
  CHECK(decision.status.message().find("rank 1 sent float32[4] as tensor 0") != std::string::npos,
        decision.status.message());
  decision = Decided({Ask("a", true), Ask("a", true), Ask("b", true)});
  CHECK(decision.kind == Kind::kFail, "");
  CHECK(decision.status.message().find(
            "rank 2 runs AllReduce \"b\", rank 0 runs AllReduce \"a\"") != std::string::npos,
        decision.status.message());
  // First the order, then the rest: only then is it known who differs in what.
  CHECK(Decided({Ask("a"), Ask("a", false, 4), Ask("b")}).kind == Kind::kReorder, "");
}

TEST(StepsThatDifferAreAnErrorThatNamesThem) {
  Request late = Ask("a", true), early = Ask("a", true);
  late.step = 12;
  early.step = 13;
  const Decision decision = Decided({late, early});
  CHECK(decision.kind == Decision::Kind::kFail, "");
  CHECK(decision.status.message().find("rank 1 is at step 13, rank 0 at step 12") !=
            std::string::npos,
        decision.status.message());
  uint64_t one[2], other[2];
  ddl::Digest(late, 0, one);
  ddl::Digest(early, 0, other);
  CHECK(one[0] != other[0] && one[1] != other[1], "they are seen to differ");
}

TEST(OrderedStreamsDifferInOrderAlone) {
  using Kind = Decision::Kind;
  CHECK(Decided({From("x", "a"), From("y", "a")}).kind == Kind::kReorder, "the same title");
  CHECK(Decided({From("x", "a"), From("x", "a")}).kind == Kind::kRun, "");
  CHECK(Decided({From("x", "a"), From("x", "b")}).kind == Kind::kFail, "");
  std::mt19937 random(3);
  std::vector<RequestQueue> ranks(3, RequestQueue(false));
  for (int step = 0; step < 20; ++step) {
    for (RequestQueue& rank : ranks) {
      int left[] = {3, 3};
      while (left[0] + left[1] > 0) {  // two threads that race
        const int thread = left[1] == 0 || (left[0] > 0 && random() % 2 == 0) ? 0 : 1;
        const std::string name = "g" + std::to_string(3 - left[thread]--);
        rank.Add(From(thread == 0 ? "x" : "y", name));
      }
    }
    std::vector<std::string> places[3];
    while (!ranks[0].empty()) {
      std::vector<Proposal> proposals;
      for (RequestQueue& rank : ranks) proposals.push_back(Proposed(*rank.Next(false)));
      if (ddl::Decide(proposals).kind == Kind::kReorder) {
        const std::vector<RequestId> order = ranks[0].Order();
        for (RequestQueue& rank : ranks) rank.Follow(order);
        continue;
      }
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const Request taken = ranks[rank].Take();
        places[rank].push_back(taken.stream + taken.name);
      }
    }
    CHECK(places[0].size() == 6 && places[0] == places[1] && places[0] == places[2], "");
    for (const char* thread : {"x", "y"}) {
      std::string seen;
      for (const std::string& place : places[0]) seen += place[0] == *thread ? place.substr(1) : "";
      CHECK(seen == "g0g1g2", seen);
    }
  }
}

CancelledRun Cancelled(int rank, int64_t position, const std::vector<RequestId>& pending = {}) {
  CancelledRun run;
  run.position = position;
  for (const RequestId& id : pending) run.pending.push_back({id, 2});
  run.reason = "rank " + std::to_string(rank) + " has cancelled it";
  run.ranks = {rank};
  return run;
}

TEST(RanksLearnWhatOthersHaveCancelled) {
  using Kind = Decision::Kind;
  const CancelledRun late = Cancelled(0, 7);
  Decision decision =
      ddl::Decide({Proposed(Ask("a"), {late}), Proposed(Ask("a")), Proposed(Ask("b"))});
  CHECK(decision.kind == Kind::kCancelled && decision.cancelled.size() == 1, "");
  CHECK(decision.cancelled[0].reason == "rank 0 has cancelled it", decision.cancelled[0].reason);
  decision = ddl::Decide({Proposed(Ask("a"), {late}), Proposed(Ask("a"), {Cancelled(1, 7)})});
  CHECK(decision.kind == Kind::kRun, "each has cancelled the same, and nobody has to be told");
  Proposal notice;
  notice.kind = Proposal::Kind::kCancelNotice;
  notice.cancelled = {late};
  CHECK(ddl::Decide({Proposed(Ask("a")), notice}).kind == Kind::kCancelled, "");
  CHECK(ddl::Decide({Proposed(Ask("a"), {late}), notice}).kind == Kind::kCancelled, "");

  // Two of rank 0; of rank 1 the second of them, as it knows that, and one more.
  const std::vector<CancelledRun> first = {late, Cancelled(0, -1, {At("a"), At("b")})};
  const std::vector<CancelledRun> second = {Cancelled(1, -1, {At("b"), At("c")}), Cancelled(1, 9)};
  decision = ddl::Decide({Proposed(Ask("a"), first), Proposed(Ask("a"), second)});
  CHECK(decision.cancelled.size() == 3, std::to_string(decision.cancelled.size()));
  CHECK(decision.cancelled[1].ranks == std::vector<int>({0, 1}), "");
  CHECK(decision.cancelled[1].pending.size() == 3, "");
  CHECK(decision.cancelled[2].position == 9, "");
}

TEST(WhatIsProposedIsReadAsItWasSent) {
  const std::vector<CancelledRun> two = {Cancelled(3, 7), Cancelled(4, -1, {At("p"), At("q")})};
  Proposal sent = Proposed(From("x", "a\nb"), two);
  sent.round = 5;
  const Proposal read = Proposal::Decode(sent.Encode());
  CHECK(read.kind == sent.kind && read.round == 5, std::to_string(read.round));
  CHECK(ddl::Encode(read.cancelled) == ddl::Encode(sent.cancelled), ddl::Encode(read.cancelled));
  CHECK(read.cancelled[1].ranks == std::vector<int>{4}, "");
  CHECK(read.cancelled[1].pending[1].id.title == "AllReduce \"q\"", "");
  CHECK(read.description == Describe(From("x", "a\nb")), read.description);
}

TEST(RanksThatHaveJoinedTakePartInWhatTheOthersRun) {
  using Kind = Decision::Kind;
  Decision decision = ddl::Decide({Joined(), Proposed(Ask("a")), Proposed(Ask("a"))});
  CHECK(decision.kind == Kind::kRun && decision.contributors == 2 && decision.first == 1, "");
  decision = ddl::Decide({Joined(), Proposed(Ask("a")), Proposed(Ask("a", false, 4))});
  CHECK(decision.kind == Kind::kFail, "");
  CHECK(decision.status.message().find("rank 2 sent float32[4] as tensor 0, rank 1 float32[3]") !=
            std::string::npos,
        decision.status.message());
  decision = ddl::Decide({Joined(), Proposed(Ask("a")), Proposed(Ask("b"))});
  CHECK(decision.kind == Kind::kReorder && decision.first == 1, "");
  decision = ddl::Decide({Joined(), Joined(true), Joined()});
  CHECK(decision.kind == Kind::kAllJoined && decision.last_joined == 1, "");
  Request weights = Ask("weights", true);
  weights.kind = Request::Kind::kBroadcast;
  decision = ddl::Decide({Joined(), Proposed(weights)});
  CHECK(decision.kind == Kind::kFail, "rank 0 has nothing to broadcast");
  weights.root = 1;
  CHECK(ddl::Decide({Joined(), Proposed(weights)}).kind == Kind::kRun, "");
}

TEST(ADescriptionTellsAllThatAJoinedRankNeeds) {
  Request request = Ask("a", true, 0);
  request.dtype = ddl::DType::kBfloat16;
  request.average = true;
  request.tensors = {{nullptr, nullptr, 6, {2, 3}}, {nullptr, nullptr, 1, {}}};
  Request read;
  CHECK(Parse(Describe(request), &read).ok(), "");
  CHECK(Describe(read) == Describe(request), Describe(read));
  CHECK(read.tensors[0].count == 6 && read.tensors[1].count == 1, "");
  for (const double tolerance : {1e-7, 0.25, 1e-45}) {
    request.tolerance = tolerance;
    CHECK(Parse(Describe(request), &read).ok() && read.tolerance == tolerance, Describe(request));
  }
  request.kind = Request::Kind::kAllGather;
  request.tensors.pop_back();
  CHECK(Parse(Describe(request), &read).ok() && read.kind == request.kind, "");
  request.kind = Request::Kind::kBroadcast;
  request.root = 3;
  CHECK(Parse(Describe(request), &read).ok() && read.root == 3, "");
  CHECK(!Parse("Op\nname\nop=sum\n\n\n\n\nfloat99[2]", &read).ok(), "");
}

TEST(LearningRatesAreComparedButForTheirLastBits) {
  using Kind = Decision::Kind;
  const auto decide = [](std::optional<float> one, std::optional<float> other) {
    Request a = Ask("a", true), b = Ask("a", true);
    a.rate = one;
    b.rate = other;
    uint64_t of_a[2], of_b[2];
    ddl::Digest(a, 0, of_a);
    ddl::Digest(b, 0, of_b);
    Decision decision = ddl::Decide({Proposed(a), Proposed(b)});
    const bool equal = of_a[0] == of_b[0] && of_a[1] == of_b[1];
    CHECK(!equal || decision.kind == Kind::kRun, decision.status.message());
    return decision;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float rate : {0.0f, 1e-3f, 0.1f, 1e-40f, 3e38f, nan}) {
    CHECK(decide(rate, rate).kind == Kind::kRun, std::to_string(rate));
    CHECK(decide(rate, std::nullopt).kind == Kind::kFail, std::to_string(rate));
  }
  CHECK(decide(nan, -nan).kind == Kind::kRun, "");
  CHECK(decide(0.1f, std::nextafter(0.1f, 1.0f)).kind == Kind::kRun, "");
  using Rates = std::pair<float, float>;
  for (const auto& [one, other] : {Rates{0.1f, 0.10001f}, Rates{1e-3f, 1e-4f}, Rates{1, nan}}) {
    CHECK(decide(one, other).kind == Kind::kFail, std::to_string(one));
  }
  const std::string said = decide(1e-3f, 1e-4f).status.message();
  const std::string rates = "rank 1 has a learning rate of 0.0001, rank 0 one of 0.001. ";
  CHECK(said.find(rates) != std::string::npos, said);
}

TEST(UnorderedRequestsOfOneNameAreKnownByTheirThreadToo) {
  Request one = Ask("gradient"), two = Ask("gradient");
  one.stream = "one";
  two.stream = "two";
  RequestQueue queue(false);
  queue.Add(one);
  queue.Add(two);
  queue.Follow({{Title(two), false, "two"}});
  CHECK(queue.Next(false)->stream == "two", "");
  CHECK(queue.Take().stream == "two" && queue.Take().stream == "one", "");
  CHECK(Decided({one, two}).kind == Decision::Kind::kReorder, "");
  CHECK(Decided({one, one}).kind == Decision::Kind::kRun, "");
  uint64_t digests[2][2];
  Digest(one, 0, digests[0]);
  Digest(two, 0, digests[1]);
  CHECK(!std::equal(digests[0], digests[0] + 2, digests[1]), "");
}

TEST(WhatIsExtractedIsGoneAndTheRestKeepsItsOrder) {
  RequestQueue queue(false);
  for (const char* name : {"a", "b", "c", "d"}) queue.Add(Ask(name, true));
  CHECK(NextName(&queue) == "a", "");
  const std::vector<Request> out = queue.Extract(
      [](const Request& request) { return request.name == "a" || request.name == "c"; });
  CHECK(out.size() == 2 && out[0].name == "a" && out[1].name == "c", "");
  CHECK(NextName(&queue) == "b" && Taken(&queue) == "b", "");
  CHECK(NextName(&queue) == "d" && Taken(&queue) == "d" && queue.empty(), "");
}
