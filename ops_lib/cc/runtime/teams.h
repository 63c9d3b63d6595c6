#ifndef DDL_RUNTIME_TEAMS_H_
#define DDL_RUNTIME_TEAMS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// Averages of gradients that a training step need not wait for, as Cray's deep learning plugin had
// them: in the pipelined phase a step hands its gradients to the engine and applies those of the
// step before, which were reduced while it computed.
//
// Every rank counts steps alike, so every rank hands over and waits alike: the order of collectives
// is that of blocking steps.

// How a team communicates. Steps count from 1.
struct TeamPlan {
  // The change between the phases takes kTransitionSteps steps, else none.
  bool smooth = false;
  // Not negative: so many blocking steps, then pipelined ones; all are blocking if max_steps are.
  // Negative: so many pipelined steps, then blocking ones.
  int64_t ksteps = 0;
  int64_t max_steps = 0;
  int64_t report_every = 0;  // steps between reports; 0: none
};

inline constexpr int64_t kTransitionSteps = 10;

// What `step` applies is (1 - weight) * its own gradients + weight * those of the previous step: 0
// in the blocking phase, 1 in the pipelined one, between them in a smooth transition.
double WeightOfPrevious(const TeamPlan& plan, int64_t step);

// The reduction of the gradients of one step, which the engine completes.
class AsyncReduction {
 public:
  using Clock = std::chrono::steady_clock;

  // `outputs` owns what the `out` of `tensors` point to.
  AsyncReduction(std::vector<TensorBuffer> tensors, std::shared_ptr<void> outputs)
      : tensors_(std::move(tensors)), outputs_(std::move(outputs)) {}

  const std::vector<TensorBuffer>& tensors() const { return tensors_; }
  const std::shared_ptr<void>& outputs() const { return outputs_; }

  // Once.
  void Complete(const Status& status);

  // Calls `then` with the status when it is complete: here and now, or in the thread that completes
  // it.
  void OnComplete(std::function<void(const Status&)> then);

  // From the start to the end. Only when it is complete.
  double seconds() const {
    return std::chrono::duration<double>(completed_at_ - started_at_).count();
  }

 private:
  const std::vector<TensorBuffer> tensors_;
  const std::shared_ptr<void> outputs_;
  const Clock::time_point started_at_ = Clock::now();
  std::mutex mutex_;  // guards what follows
  bool complete_ = false;
  Status status_;
  Clock::time_point completed_at_;
  std::vector<std::function<void(const Status&)>> waiting_;
};

// What a step applies; see WeightOfPrevious.
struct StepGradients {
  Status status;
  double weight = 0;
  std::shared_ptr<AsyncReduction> own;  // null if weight is 1
  // Null if there is no previous step: then zeros if weight is 1, else `own`.
  std::shared_ptr<AsyncReduction> previous;

  // Writes tensor `index`, of `count` elements, of what the step applies.
  void Write(size_t index, int64_t count, DType dtype, void* out) const;
};

// The teams of a process. Each has a plan; and each series of gradients in it, known by its name
// and thread, counts its steps and has at most one reduction that the next step waits for.
class Teams {
 public:
  // `submit` hands a request to the engine; `report` prints a line, if this is rank 0.
  Teams(std::function<void(Request)> submit, std::function<void(const std::string&)> report)
      : submit_(std::move(submit)), report_(std::move(report)) {}

  // There are `count` teams, and no step has more than `max_elements` elements. Plans stay.
  void Prepare(int count, int64_t max_elements);

  // Gives a team its plan; its series start anew. InvalidArgument if there is no such team,
  // FailedPrecondition before Prepare.
  Status Configure(int team, const TeamPlan& plan);

  // One step of the series `request.name`: averages the request's tensors over the ranks.
  //
  // `inputs` owns what the tensors' `in` point to, `outputs` the same for `out`; they live as long
  // as they are needed. `then` gets what the step applies, in this thread or the engine's.
  // The error may be FailedPrecondition (no plan), InvalidArgument (too many elements, or other
  // shapes than in the step before) or one of the collective's.
  void Step(int team, Request request, std::shared_ptr<void> inputs, std::shared_ptr<void> outputs,
            std::function<void(const StepGradients&)> then);

 private:
  using Clock = std::chrono::steady_clock;
  struct Series {
    int64_t step = 0;
    std::shared_ptr<AsyncReduction> previous;
    // Since the last report.
    double communicating_s = 0;
    double waited_s = 0;
  };
  using Key = std::tuple<int, std::string, std::string>;  // team, thread, name

  // Decides on the next step of a series.
  Status Begin(const Key& key, const Request& request, std::shared_ptr<void> outputs,
               TeamPlan* plan, int64_t* step, std::shared_ptr<AsyncReduction>* started,
               StepGradients* gradients);
  void Account(const Key& key, const TeamPlan& plan, int64_t step, Clock::time_point begin,
               int64_t nbytes, const StepGradients& gradients);

  const std::function<void(Request)> submit_;
  const std::function<void(const std::string&)> report_;
  std::mutex mutex_;  // guards what follows
  int count_ = 0;
  int64_t max_elements_ = 0;
  std::map<int, TeamPlan> plans_;
  std::map<Key, Series> series_;
};

// The teams of this process, over its engine.
Teams& ProcessTeams();

}  // namespace ddl

#endif  // DDL_RUNTIME_TEAMS_H_
