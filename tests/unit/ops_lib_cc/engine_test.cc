// The engine, without MPI: its ranks are processes, and reach each other through shared memory.

#include "runtime/engine.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "allocations.h"
#include "comm/mpi_connect.h"
#include "ranks.h"
#include "subnormals.h"
#include "thread_communicator.h"

namespace {

ddl::HostGroup* joined = nullptr;  // by this rank

// Of the engine's thread: which of its allocations fails, counted from when the test says so.
thread_local bool is_engine = false;
sigset_t engine_signals;  // that its thread does not get
std::atomic<int> allocations_left{0};
std::atomic<bool> has_failed{false};
std::function<void()> while_connecting;

class Rank : public ThreadCommunicator, public ddl::Baseline {
 public:
  Rank() : ThreadCommunicator(joined, nullptr, /*shares_memory=*/true) {}
  ddl::Baseline* baseline() override { return this; }
  ddl::Status AllReduce(const void* in, void* out, int64_t count, ddl::DType dtype) override {
    return ThreadCommunicator::AllReduce(in, out, count, dtype, 1);
  }
  using ThreadCommunicator::AllReduce;
};

}  // namespace

// Stand-ins for those over MPI.
ddl::MpiSession::MpiSession(std::function<void()> on_finalize)
    : on_finalize_(std::move(on_finalize)), keyval_(0) {}
ddl::Status ddl::MpiSession::Open() { return Status(); }
void ddl::MpiSession::Close() {}

ddl::Status ddl::Connect(const Config&, int, const std::vector<int>&,
                         std::unique_ptr<Communicator>* communicator) {
  is_engine = true;
  pthread_sigmask(SIG_BLOCK, nullptr, &engine_signals);
  if (while_connecting) while_connecting();
  *communicator = std::make_unique<Rank>();
  return Status();
}

namespace {

// Sums a number over the ranks, for a session of this rank and a run of its; tells how that ended.
std::future<ddl::Status> BeginSum(float* value, uint64_t session = 0, int64_t run = 0) {
  const auto ended = std::make_shared<std::promise<ddl::Status>>();
  ddl::Request request;
  request.op_name = "AllReduce";
  request.name = "a name that is too long to be kept without an allocation";
  request.ordered = false;
  request.tensors = {{value, value, 1, {1}}};
  request.session = session;
  request.run = run;
  request.done = [ended](const ddl::Status& status) { ended->set_value(status); };
  ddl::Engine::Get().Submit(std::move(request));
  return ended->get_future();
}

// This process's, as one of two ranks, for a minute at most.
void StartEngine(ddl::HostGroup* group) {
  alarm(60);
  joined = group;
  ddl::Topology topology;
  const ddl::Status started = ddl::Engine::Get().Start(&topology);
  CHECK(started.ok() && topology.size == 2, started.message());
}

ddl::Status Sum(float* value) { return BeginSum(value).get(); }

// Rank 1 has no memory, once, wherever its engine asks for some. It must not end the process, and no
// request may wait for ever, on no rank.
TEST(AnAllocationThatFailsInTheEngineIsAnErrorOfItsRequests) {
  constexpr int kMost = 200;
  int failing = 1;
  for (bool reached = true; reached && failing < kMost; ++failing) {
    SharedCount failures;
    RunProcesses(2, [&](ddl::HostGroup& group) {
      StartEngine(&group);
      float value = 1;
      ddl::Status status = Sum(&value);
      CHECK(status.ok() && value == 2, status.message());
      if (group.rank() == 1) {
        allocations_left = failing;
        allocation_fails = [](size_t) {
          if (!is_engine || --allocations_left != 0) return false;
          has_failed = true;
          return true;
        };
      }
      for (int i = 0; i < 3; ++i) {
        const bool failed = !status.ok();
        value = 1;
        status = Sum(&value);
        CHECK(status.ok() ? !failed && value == 2 : status.code() != ddl::Code::kDeadlineExceeded,
              status.message());
      }
      ddl::Engine::Get().Leave();
      allocation_fails = nullptr;
      if (has_failed) failures.Add();
    });
    reached = failures.count() > 0;
  }
  CHECK(failing > 10 && failing < kMost, std::to_string(failing) + " allocations");
}

// What each session of rank 1 asks for could be either's of rank 0.
TEST(TwoSessionsThatAskForOneNameAtOnceAreAnErrorOnAllRanks) {
  SharedCount asked;
  RunProcesses(2, [&](ddl::HostGroup& group) {
    StartEngine(&group);
    for (const int second : {1, 2}) {  // one session may ask for it twice
      if (group.rank() == 1) asked.Await(second);
      float values[2] = {1, 1};
      std::future<ddl::Status> sums[] = {BeginSum(&values[0], 1), BeginSum(&values[1], second)};
      if (group.rank() == 0) asked.Add();
      for (int i = 0; i < 2; ++i) {
        const ddl::Status ended = sums[i].get();
        if (second == 1) {
          CHECK(ended.ok() && values[i] == 2, ended.message());
        } else if (group.rank() == 0 || i == 1) {
          CHECK(ended.code() == ddl::Code::kFailedPrecondition, ended.message());
          CHECK(ended.message().find("two sessions of rank") != std::string::npos,
                ended.message());
        }
      }
    }
    ddl::Engine::Get().Leave();
  });
}

// As where two threads run a function that one has traced: its gradients have one name.
TEST(TwoRunsThatAskForOneNameAtOnceAreAnErrorOnAllRanks) {
  SharedCount asked;
  RunProcesses(2, [&](ddl::HostGroup& group) {
    StartEngine(&group);
    if (group.rank() == 1) asked.Await(1);
    float values[2] = {1, 1};
    std::future<ddl::Status> sums[] = {BeginSum(&values[0], 1, 1), BeginSum(&values[1], 1, 2)};
    if (group.rank() == 0) asked.Add();
    for (int i = 0; i < 2; ++i) {
      const ddl::Status ended = sums[i].get();
      if (group.rank() == 1 && i == 0) continue;  // it may have been done before
      CHECK(ended.code() == ddl::Code::kFailedPrecondition, ended.message());
      CHECK(ended.message().find("two threads of rank") != std::string::npos, ended.message());
    }
    ddl::Engine::Get().Leave();
  });
}

// A kernel that runs then does not know how many ranks there are, and has not looked at its root.
TEST(ACollectiveThatRunsWhileTheEngineOpensIsRefused) {
  RunProcesses(2, [&](ddl::HostGroup& group) {
    float early = 1, value = 1;
    std::future<ddl::Status> refused;
    while_connecting = [&] { refused = BeginSum(&early); };
    StartEngine(&group);
    const ddl::Status ended = refused.get();
    CHECK(ended.code() == ddl::Code::kFailedPrecondition, ended.message());
    CHECK(ended.message().find("Call ddl.init (op Init) before") != std::string::npos,
          ended.message());
    const ddl::Status summed = Sum(&value);
    CHECK(summed.ok() && value == 2, summed.message());
    ddl::Engine::Get().Leave();
  });
}

// The thread that asks has no memory, once, wherever it needs some.
TEST(AnAllocationThatFailsWhereACollectiveIsAskedForIsAnErrorOfIt) {
  for (int failing = 1; failing < 40; ++failing) {
    RunProcesses(1, [&](ddl::HostGroup& group) {
      alarm(60);
      joined = &group;
      ddl::Topology topology;
      CHECK(ddl::Engine::Get().Start(&topology).ok(), "no engine");
      float value = 1;
      std::promise<ddl::Status> ended;
      ddl::Request request;
      request.op_name = "AllReduce";
      request.name = "a name that is too long to be kept without an allocation";
      request.tensors = {{&value, &value, 1, {1}}};
      request.done = [&ended](const ddl::Status& status) { ended.set_value(status); };
      static thread_local bool asks = false;
      asks = true;
      allocations_left = failing;
      allocation_fails = [](size_t) { return asks && --allocations_left == 0; };
      ddl::Engine::Get().Submit(std::move(request));
      asks = false;
      const ddl::Status status = ended.get_future().get();
      allocation_fails = nullptr;
      CHECK(status.ok() || status.code() == ddl::Code::kInternal, status.message());
      ddl::Engine::Get().Leave();
    });
  }
}

// As where the op Init runs in a thread of TensorFlow. One element goes through no vector.
TEST(TheEngineComputesAsByDefaultAndGetsNoSignals) {
  RunProcesses(2, [&](ddl::HostGroup& group) {
    FlushSubnormals();
    StartEngine(&group);
    uint16_t smallest = 1;
    std::promise<ddl::Status> ended;
    ddl::Request request;
    request.op_name = "AllReduce";
    request.name = "a";
    request.dtype = ddl::DType::kFloat16;
    request.tensors = {{&smallest, &smallest, 1, {1}}};
    request.done = [&ended](const ddl::Status& status) { ended.set_value(status); };
    ddl::Engine::Get().Submit(std::move(request));
    const ddl::Status status = ended.get_future().get();
    CHECK(status.ok() && smallest == 2, status.message() + std::to_string(smallest));
    CHECK(sigismember(&engine_signals, SIGPROF) == 1, "a profiler interrupts it");
    CHECK(sigismember(&engine_signals, SIGSEGV) == 0, "nothing tells where it crashed");
    ddl::Engine::Get().Leave();
  });
}

TEST(AnEngineWithoutAThreadIsAnError) {
  RunProcesses(1, [&](ddl::HostGroup& group) {
    joined = &group;
    // The limit is not for root.
    CHECK(geteuid() != 0 || setresuid(65'534, 65'534, 65'534) == 0, "cannot be another user");
    const rlimit none = {0, 0};
    setrlimit(RLIMIT_NPROC, &none);
    for (int i = 0; i < 2; ++i) {
      ddl::Topology topology;
      const std::string said = ddl::Engine::Get().Start(&topology).message();
      CHECK(said.rfind("cannot start a thread: ", 0) == 0 &&
                said.find("Raise the limit of processes (ulimit -u, ") != std::string::npos,
            said);
    }
    float value = 1;
    const ddl::Status status = Sum(&value);
    CHECK(status.message().rfind("cannot start a thread", 0) == 0, status.message());
    ddl::Engine::Get().Leave();
  });
}

}  // namespace
