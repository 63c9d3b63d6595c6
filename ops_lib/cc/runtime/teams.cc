#include "runtime/teams.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/arithmetic.h"

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

const char* PhaseName(double share) {
  return share == 0 ? "blocking" : share == 1 ? "pipelined" : "in transition";
}

}  // namespace

double ShareOfBefore(const TeamPlan& plan, int64_t step) {
  if (plan.ksteps >= 0 && plan.ksteps >= plan.max_steps) return 0;
  const int64_t into_second = step - std::abs(plan.ksteps);
  double second = into_second > 0 ? 1 : 0;
  if (plan.smooth && into_second > 0) {
    second = std::min(1.0, static_cast<double>(into_second) / (kTransitionSteps + 1));
  }
  return plan.ksteps >= 0 ? second : 1 - second;
}

void Flight::Land(const Status& status) {
  std::vector<std::function<void(const Status&)>> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    landed_ = true;
    landed_at_ = Clock::now();
    status_ = status;
    waiting.swap(waiting_);
  }
  for (const auto& then : waiting) then(status);
}

void Flight::WhenLanded(std::function<void(const Status&)> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!landed_) {
      waiting_.push_back(std::move(then));
      return;
    }
  }
  then(status_);  // which does not change any more
}

void StepGradients::Write(size_t index, int64_t count, DType dtype, void* out) const {
  const void* fresh = own ? own->tensors()[index].out : nullptr;
  const void* late = before ? before->tensors()[index].out : nullptr;
  const size_t nbytes = count * DTypeSize(dtype);
  if (nbytes == 0) return;
  if (fresh != nullptr && late != nullptr) {
    Mix(fresh, late, out, count, dtype, share);
  } else if (const void* only = fresh != nullptr ? fresh : late) {
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
  streams_.erase(streams_.lower_bound({team, "", ""}), streams_.lower_bound({team + 1, "", ""}));
  return Status();
}

Status Teams::Begin(const Key& key, const Request& request, std::shared_ptr<void> outputs,
                    TeamPlan* plan, int64_t* step, std::shared_ptr<Flight>* started,
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
  Stream& stream = streams_[key];
  *plan = planned->second;
  *step = ++stream.step;
  gradients->share = ShareOfBefore(*plan, *step);
  const double next = ShareOfBefore(*plan, *step + 1);
  // What was applied as a whole is not applied once more: an abrupt start of the pipelined phase
  // finds nothing before it.
  const bool next_needs_it = next > 0 && (gradients->share > 0 || next < 1);
  if (gradients->share > 0) gradients->before = std::move(stream.before);
  stream.before = nullptr;
  if (gradients->before && !SameShapes(gradients->before->tensors(), request.tensors)) {
    return Status(Code::kInvalidArgument,
                  what + "the tensors have other shapes than those of the step before, which are "
                         "still to be applied. Give each model a team of its own, or call "
                         "config_team again.");
  }
  if (gradients->share == 1 && !next_needs_it) return Status();  // nobody will ask for them
  *started = std::make_shared<Flight>(request.tensors, std::move(outputs));
  if (next_needs_it) stream.before = *started;
  if (gradients->share < 1) gradients->own = *started;
  return Status();
}

void Teams::Step(int team, Request request, std::shared_ptr<void> inputs,
                 std::shared_ptr<void> outputs, std::function<void(const StepGradients&)> then) {
  const Clock::time_point begin = Clock::now();
  const Key key(team, request.stream, request.name);
  const int64_t nbytes = Elements(request.tensors) * static_cast<int64_t>(DTypeSize(request.dtype));
  TeamPlan plan;
  int64_t step = 0;
  std::shared_ptr<Flight> started;
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
    request.done = [started](const Status& status) { started->Land(status); };
    submit_(std::move(request));
  }
  const auto finish = [this, key, plan, step, begin, nbytes, then = std::move(then)](
                          StepGradients result, const Status& status) {
    result.status = status;
    if (status.ok()) Account(key, plan, step, begin, nbytes, result);
    then(result);
  };
  const auto after_before = [gradients, finish](const Status& status) {
    if (!status.ok() || !gradients.own) return finish(gradients, status);
    gradients.own->WhenLanded([gradients, finish](const Status& own) { finish(gradients, own); });
  };
  if (!gradients.before) return after_before(Status());
  gradients.before->WhenLanded(after_before);
}

void Teams::Account(const Key& key, const TeamPlan& plan, int64_t step, Clock::time_point begin,
                    int64_t nbytes, const StepGradients& gradients) {
  if (plan.report_every <= 0) return;
  const double waited_s = std::chrono::duration<double>(Clock::now() - begin).count();
  const Flight* flight = gradients.own ? gradients.own.get() : gradients.before.get();
  char line[320];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Stream& stream = streams_[key];
    stream.waited_s += waited_s;
    stream.communicating_s += std::max(flight != nullptr ? flight->seconds() : 0, waited_s);
    if (step % plan.report_every != 0) return;
    const double per_step_ms = 1e3 / static_cast<double>(plan.report_every);
    std::snprintf(line, sizeof(line),
                  "dl_comm team %d \"%.100s\": step %lld of %lld, %s: %.3f MB a step, "
                  "communication %.3f ms a step, %.3f ms of it hidden behind computing",
                  std::get<0>(key), std::get<2>(key).c_str(), static_cast<long long>(step),
                  static_cast<long long>(plan.max_steps), PhaseName(gradients.share),
                  static_cast<double>(nbytes) / 1e6, stream.communicating_s * per_step_ms,
                  (stream.communicating_s - stream.waited_s) * per_step_ms);
    stream.communicating_s = stream.waited_s = 0;
  }
  report_(line);
}

}  // namespace ddl
