#include "runtime/teams.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "core/float_environment.h"
#include "core/numbers.h"

namespace ddl {
namespace {

int64_t Elements(const std::vector<TensorBuffer>& tensors) {
  int64_t count = 0;
  for (const TensorBuffer& tensor : tensors) count += tensor.count;
  return count;
}

bool SameShapes(const std::vector<TensorBuffer>& a, const std::vector<TensorBuffer>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const TensorBuffer& x, const TensorBuffer& y) { return x.dims == y.dims; });
}

const char* PhaseName(double weight) {
  return weight == 0 ? "blocking" : weight == 1 ? "pipelined" : "in transition";
}

}  // namespace

double WeightOfPrevious(const TeamPlan& plan, int64_t step) {
  if (plan.ksteps >= 0 && plan.ksteps >= plan.max_steps) return 0;
  const int64_t into_second = step - std::abs(plan.ksteps);
  double second = into_second > 0 ? 1 : 0;
  if (plan.smooth && into_second > 0) {
    second = std::min(1.0, static_cast<double>(into_second) / (kTransitionSteps + 1));
  }
  return plan.ksteps >= 0 ? second : 1 - second;
}

void AsyncReduction::Complete(const Status& status) {
  std::vector<std::function<void(const Status&)>> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    completed_at_ = Clock::now();
    status_ = status;
    waiting.swap(waiting_);
  }
  for (const auto& then : waiting) then(status);
}

void AsyncReduction::OnComplete(std::function<void(const Status&)> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!complete_) {
      waiting_.push_back(std::move(then));
      return;
    }
  }
  then(status_);  // which does not change any more
}

void StepGradients::Write(size_t index, int64_t count, DType dtype, void* out) const {
  const void* current = own ? own->tensors()[index].out : nullptr;
  const void* earlier = previous ? previous->tensors()[index].out : nullptr;
  const size_t nbytes = count * DTypeSize(dtype);
  if (nbytes == 0) return;
  if (current != nullptr && earlier != nullptr) {
    const DefaultFloatEnvironment environment;  // the same on all ranks, whatever thread this is
    Interpolate(current, earlier, out, count, dtype, weight);
  } else if (const void* only = current != nullptr ? current : earlier) {
    std::memcpy(out, only, nbytes);
  } else {
    std::memset(out, 0, nbytes);
  }
}

void Teams::Prepare(int count, int64_t max_elements) {
  std::lock_guard<std::mutex> lock(mutex_);
  count_ = count;
  max_elements_ = max_elements;
}

Status Teams::Configure(int team, const TeamPlan& plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (count_ == 0) {
    return Status(Code::kFailedPrecondition,
                  "dl_comm.config_team() before dl_comm.init(), which says how many teams there "
                  "are. Call init first.");
  }
  if (team < 0 || team >= count_) {
    return Status(Code::kInvalidArgument,
                  "dl_comm.config_team(): there is no team " + std::to_string(team) +
                      ". dl_comm.init() was asked for " + std::to_string(count_) +
                      ", which count from 0.");
  }
  plans_[team] = plan;
  series_.erase(series_.lower_bound({team, "", ""}), series_.lower_bound({team + 1, "", ""}));
  return Status();
}

Status Teams::Begin(const Key& key, const Request& request, std::shared_ptr<void> outputs,
                    TeamPlan* plan, int64_t* step, std::shared_ptr<AsyncReduction>* started,
                    StepGradients* gradients) {
  const std::string what = "dl_comm.gradients(), \"" + request.name + "\": ";
  std::lock_guard<std::mutex> lock(mutex_);
  const int number = std::get<0>(key);
  const auto planned = plans_.find(number);
  if (planned == plans_.end()) {
    const std::string team = std::to_string(number);
    return Status(Code::kFailedPrecondition,
                  what + (count_ == 0 ? "ran before dl_comm.init(). Call init and config_team(" +
                                            team + ", ...) before the first step."
                                      : "team " + team + " is not configured. Call config_team(" +
                                            team + ", ...) before the first step."));
  }
  if (const int64_t elements = Elements(request.tensors); elements > max_elements_) {
    return Status(Code::kInvalidArgument,
                  what + std::to_string(elements) + " elements, but dl_comm.init() was told of " +
                      std::to_string(max_elements_) +
                      " at most. Give init the number of elements of the model, not of its "
                      "variables.");
  }
  Series& series = series_[key];
  *plan = planned->second;
  *step = ++series.step;
  gradients->weight = WeightOfPrevious(*plan, *step);
  const double next = WeightOfPrevious(*plan, *step + 1);
  // What was applied as a whole is not applied once more: an abrupt start of the pipelined phase
  // finds nothing before it.
  const bool next_needs_it = next > 0 && (gradients->weight > 0 || next < 1);
  if (gradients->weight > 0) gradients->previous = std::move(series.previous);
  series.previous = nullptr;
  if (gradients->previous && !SameShapes(gradients->previous->tensors(), request.tensors)) {
    return Status(Code::kInvalidArgument,
                  what + "the tensors have other shapes than those of the step before, which are "
                         "still to be applied. Give each model a team of its own, or call "
                         "config_team again.");
  }
  if (gradients->weight == 1 && !next_needs_it) return Status();  // no step will apply them
  *started = std::make_shared<AsyncReduction>(request.tensors, std::move(outputs));
  if (next_needs_it) series.previous = *started;
  if (gradients->weight < 1) gradients->own = *started;
  return Status();
}

void Teams::Step(int team, Request request, std::shared_ptr<void> inputs,
                 std::shared_ptr<void> outputs, std::function<void(const StepGradients&)> then) {
  const Clock::time_point begin = Clock::now();
  const Key key(team, request.stream, request.name);
  const int64_t nbytes = Elements(request.tensors) * static_cast<int64_t>(DTypeSize(request.dtype));
  TeamPlan plan;
  int64_t step = 0;
  std::shared_ptr<AsyncReduction> started;
  StepGradients gradients;
  // Both, because messages may point to either.
  request.memory = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      std::move(inputs), outputs);
  gradients.status = Begin(key, request, std::move(outputs), &plan, &step, &started, &gradients);
  if (!gradients.status.ok()) {
    then(gradients);
    return;
  }
  if (started) {
    request.average = true;
    request.step = step;
    request.done = [started](const Status& status) { started->Complete(status); };
    submit_(std::move(request));
  }
  const auto finish = [this, key, plan, step, begin, nbytes, then = std::move(then)](
                          StepGradients result, const Status& status) {
    result.status = status;
    if (status.ok()) Account(key, plan, step, begin, nbytes, result);
    then(result);
  };
  const auto after_previous = [gradients, finish](const Status& status) {
    if (!status.ok() || !gradients.own) return finish(gradients, status);
    gradients.own->OnComplete([gradients, finish](const Status& own) { finish(gradients, own); });
  };
  if (!gradients.previous) return after_previous(Status());
  gradients.previous->OnComplete(after_previous);
}

void Teams::Account(const Key& key, const TeamPlan& plan, int64_t step, Clock::time_point begin,
                    int64_t nbytes, const StepGradients& gradients) {
  if (plan.report_every <= 0) return;
  const double waited_s = std::chrono::duration<double>(Clock::now() - begin).count();
  const AsyncReduction* reduction = gradients.own ? gradients.own.get() : gradients.previous.get();
  std::string line;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Series& series = series_[key];
    series.waited_s += waited_s;
    series.communicating_s += std::max(reduction != nullptr ? reduction->seconds() : 0, waited_s);
    if (step % plan.report_every != 0) return;
    const double per_step_ms = 1e3 / static_cast<double>(plan.report_every);
    line = Format("dl_comm team %d \"%.100s\": step %lld of %lld, %s: %.3f MB a step, "
                  "communication %.3f ms a step, %.3f ms of it hidden behind computing",
                  std::get<0>(key), std::get<2>(key).c_str(), static_cast<long long>(step),
                  static_cast<long long>(plan.max_steps), PhaseName(gradients.weight),
                  static_cast<double>(nbytes) / 1e6, series.communicating_s * per_step_ms,
                  (series.communicating_s - series.waited_s) * per_step_ms);
    series.communicating_s = series.waited_s = 0;
  }
  report_(line);
}

}  // namespace ddl
