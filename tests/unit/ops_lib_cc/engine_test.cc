// The engine, without MPI: its ranks are processes, and reach each other through shared memory.

#include "runtime/engine.h"

#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "allocations.h"
#include "comm/mpi_connect.h"
#include "ranks.h"
#include "thread_communicator.h"

namespace {

ddl::HostGroup* joined = nullptr;  // by this rank

// Of the engine's thread: which of its allocations fails, counted from when the test says so.
thread_local bool is_engine = false;
std::atomic<int> allocations_left{0};
std::atomic<bool> has_failed{false};

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
bool ddl::MpiSession::HasAbandonedMessages() { return false; }

ddl::Status ddl::Connect(const Config&, int, const std::vector<int>&,
                         std::unique_ptr<Communicator>* communicator) {
  is_engine = true;
  *communicator = std::make_unique<Rank>();
  return Status();
}

namespace {

// Sums a number over the ranks; returns how that ended.
ddl::Status Sum(float* value) {
  std::promise<ddl::Status> ended;
  ddl::Request request;
  request.op_name = "AllReduce";
  request.name = "a name that is too long to be kept without an allocation";
  request.ordered = false;
  request.tensors = {{value, value, 1, {1}}};
  request.done = [&ended](const ddl::Status& status) { ended.set_value(status); };
  ddl::Engine::Get().Submit(std::move(request));
  return ended.get_future().get();
}

// Rank 1 has no memory, once, wherever its engine asks for some. It must not end the process, and no
// request may wait for ever, on no rank.
TEST(AnAllocationThatFailsInTheEngineIsAnErrorOfItsRequests) {
  constexpr int kMost = 200;
  int failing = 1;
  for (bool reached = true; reached && failing < kMost; ++failing) {
    SharedCount failures;
    RunProcesses(2, [&](ddl::HostGroup& group) {
      alarm(60);
      joined = &group;
      ddl::Topology topology;
      const ddl::Status started = ddl::Engine::Get().Start(&topology);
      CHECK(started.ok() && topology.size == 2, started.message());
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

}  // namespace
