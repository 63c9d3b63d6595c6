#include "runtime/negotiator.h"

#include <algorithm>
#include <random>

#include "check.h"
#include "runtime/description.h"

using ddl::Negotiator;
using ddl::Request;
using ddl::Turn;

namespace {

Request Ask(const std::string& name, bool ordered = false, int64_t count = 3) {
  Request request;
  request.op_name = "AllReduce";
  request.name = name;
  request.ordered = ordered;
  request.tensors.push_back({nullptr, nullptr, count, {count}});
  return request;
}

Turn At(const std::string& name, bool ordered = false) { return {Title(Ask(name)), ordered}; }

std::string Shown(Negotiator* negotiator, bool patient = false) {
  const Request* shown = negotiator->Show(patient);
  return shown == nullptr ? "nothing" : shown->name;
}

std::string Taken(Negotiator* negotiator) { return negotiator->Take().name; }

std::string Sequence(const std::vector<Turn>& order) {
  std::string text;
  for (const Turn& turn : order) text += turn.title + (turn.ordered ? "! " : " ");
  return text;
}

// Runs until all ranks are through, as the engine does; says in how many rounds they differed.
int RunAll(std::vector<Negotiator>* ranks, std::vector<std::string>* ran) {
  int negotiations = 0;
  while (!(*ranks)[0].empty()) {
    std::vector<std::string> descriptions;
    std::vector<bool> ordered;
    for (Negotiator& rank : *ranks) {
      const Request* shown = rank.Show(/*patient=*/false);
      CHECK(shown != nullptr, "a rank has nothing to show");
      if (shown == nullptr) return -1;
      descriptions.push_back(Describe(*shown));
      ordered.push_back(shown->ordered);
    }
    bool same = false;
    const ddl::Status status = ddl::Decide(descriptions, ordered, &same);
    CHECK(status.ok(), status.message());
    if (!same) {
      ++negotiations;
      const std::vector<Turn> order = (*ranks)[0].Order();
      for (Negotiator& rank : *ranks) rank.Follow(order);
      continue;
    }
    ran->push_back((*ranks)[0].Take().name);
    for (size_t i = 1; i < ranks->size(); ++i) {
      CHECK(Taken(&(*ranks)[i]) == ran->back(), "another one than rank 0's");
    }
  }
  for (const Negotiator& rank : *ranks) CHECK(rank.empty(), "something is left");
  return negotiations;
}

}  // namespace

TEST(OrderedRequestsKeepTheirOrderAndNobodyWaits) {
  Negotiator negotiator(false);
  CHECK(Shown(&negotiator) == "nothing", "");
  for (const char* name : {"a", "b", "a"}) negotiator.Add(Ask(name, true));
  for (const char* name : {"a", "b", "a"}) {
    CHECK(Shown(&negotiator, true) == name, name);
    CHECK(Taken(&negotiator) == name, name);
  }
  negotiator.Add(Ask("c", true));  // b came after a the last time, and nothing else is free
  CHECK(Shown(&negotiator, true) == "c", "");
}

TEST(AloneNobodyWaits) {
  Negotiator negotiator(true);
  for (const char* name : {"a", "b", "a", "c"}) {
    negotiator.Add(Ask(name));
    CHECK(Shown(&negotiator, true) == name, name);
    CHECK(Taken(&negotiator) == name, name);
  }
}

TEST(ChoiceOfRank0OvertakesAndIsAwaited) {
  Negotiator negotiator(false);
  negotiator.Add(Ask("a"));
  negotiator.Add(Ask("b"));
  CHECK(Shown(&negotiator) == "a", "");
  negotiator.Follow({At("c"), At("b")});
  CHECK(negotiator.HasChoice() && negotiator.choice().title == "AllReduce \"c\"", "");
  CHECK(Shown(&negotiator) == "nothing", "");
  negotiator.Add(Ask("c"));
  CHECK(Shown(&negotiator) == "c", "");
  CHECK(Taken(&negotiator) == "c", "");
  CHECK(!negotiator.HasChoice(), "");
  CHECK(Shown(&negotiator) == "b", "rank 0 has told that b comes next");
  CHECK(Taken(&negotiator) == "b", "");
  CHECK(Shown(&negotiator) == "a", "");
}

TEST(ChoiceCanBeGivenUp) {
  Negotiator negotiator(false);
  negotiator.Add(Ask("a"));
  negotiator.Follow({At("c")});
  CHECK(Shown(&negotiator) == "nothing", "");
  negotiator.Follow({});
  CHECK(!negotiator.HasChoice() && Shown(&negotiator) == "a", "");
}

TEST(OrderedRequestIsNotOvertakenByAnother) {
  Negotiator negotiator(false);
  negotiator.Add(Ask("free"));
  negotiator.Add(Ask("first", true));
  negotiator.Add(Ask("second", true));
  negotiator.Follow({At("second", true)});
  CHECK(Shown(&negotiator) == "first", "the mismatch has to show");
  negotiator.Follow({At("free")});
  CHECK(Shown(&negotiator) == "free", "");
  CHECK(Sequence(negotiator.Order()) ==
            "AllReduce \"free\" AllReduce \"first\"! AllReduce \"second\"! ",
        Sequence(negotiator.Order()));
}

TEST(RequestsOfOneNameTakeTurns) {
  Negotiator negotiator(false);
  for (int64_t count : {1, 2, 3}) {
    negotiator.Add(Ask("a", false, count));
    negotiator.Add(Ask("b", false, count));
  }
  for (int64_t count : {1, 2, 3}) {
    negotiator.Follow({At("b")});
    CHECK(negotiator.Show(false)->tensors[0].count == count, std::to_string(count));
    CHECK(Taken(&negotiator) == "b", "");
  }
}

TEST(IterationsOfALoopAreToldApart) {
  Negotiator negotiator(false);
  for (const char* iteration : {" iteration 2", " iteration 1"}) {
    negotiator.Add(Ask("a"));
    negotiator.Add(Ask("a"));
    Request request = Ask("a");
    request.instance = iteration;
    negotiator.Add(std::move(request));
  }
  negotiator.Follow({{"AllReduce \"a iteration 1\"", false}});
  CHECK(negotiator.Show(false)->instance == " iteration 1", "");
}

TEST(WhatCameNextIsExpectedForAWhile) {
  Negotiator negotiator(false);
  for (const char* name : {"a", "b", "c", "a"}) {
    negotiator.Add(Ask(name));
    CHECK(Shown(&negotiator) == name && Taken(&negotiator) == name, name);
  }
  negotiator.Add(Ask("c"));
  CHECK(Shown(&negotiator, true) == "nothing", "b came after a");
  CHECK(Shown(&negotiator) == "c", "but c is there");
  negotiator.Add(Ask("b"));
  CHECK(Shown(&negotiator, true) == "b", "");
  CHECK(Taken(&negotiator) == "b", "");
  CHECK(Shown(&negotiator, true) == "c" && Taken(&negotiator) == "c", "");
}

TEST(RanksAgreeOnceHoweverTheirOrderDiffers) {
  std::mt19937 random(7);
  for (int size : {2, 3, 5}) {
    std::vector<Negotiator> ranks(size, Negotiator(false));
    int negotiations = 0, most_later = 0;
    for (int step = 0; step < 50; ++step) {
      std::vector<std::string> ran;
      for (Negotiator& rank : ranks) {
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
  const auto decide = [](const std::vector<Request>& fronts, bool* same) {
    std::vector<std::string> descriptions;
    std::vector<bool> ordered;
    for (const Request& front : fronts) {
      descriptions.push_back(Describe(front));
      ordered.push_back(front.ordered);
    }
    return ddl::Decide(descriptions, ordered, same);
  };
  bool same = false;
  CHECK(decide({Ask("a"), Ask("a"), Ask("a", true)}, &same).ok() && same, "");
  CHECK(decide({Ask("a"), Ask("a"), Ask("b", true)}, &same).ok() && !same, "");
  CHECK(decide({Ask("a", true), Ask("b")}, &same).ok() && !same, "");
  ddl::Status status = decide({Ask("a"), Ask("a", false, 4)}, &same);
  CHECK(status.code() == ddl::Code::kInvalidArgument, status.message());
  CHECK(status.message().find("rank 1 sent float32[4] as tensor 0") != std::string::npos,
        status.message());
  status = decide({Ask("a", true), Ask("a", true), Ask("b", true)}, &same);
  CHECK(status.code() == ddl::Code::kInvalidArgument, status.message());
  CHECK(status.message().find("rank 2 runs AllReduce \"b\", rank 0 runs AllReduce \"a\"") !=
            std::string::npos,
        status.message());
  // First the order, then the rest: only then is it known who differs in what.
  CHECK(decide({Ask("a"), Ask("a", false, 4), Ask("b")}, &same).ok() && !same, "");
}
