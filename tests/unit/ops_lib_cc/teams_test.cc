#include "runtime/teams.h"

#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "check.h"
#include "core/arithmetic.h"
#include "core/half.h"
#include "subnormals.h"

namespace {

using ddl::Code;
using ddl::Request;
using ddl::Status;
using ddl::StepGradients;
using ddl::TeamPlan;

// Teams over an engine that does what the test says. Step t brings the gradient t; the average over
// the ranks is ten times as much.
struct Site {
  std::vector<Request> submitted;
  std::vector<std::string> lines;
  ddl::Teams teams{[this](Request request) { submitted.push_back(std::move(request)); },
                   [this](const std::string& line) { lines.push_back(line); }};
  std::vector<float> applied;
  std::vector<Status> errors;
  float step = 0;

  explicit Site(const TeamPlan& plan) {
    teams.Prepare(2, 4);
    const Status configured = teams.Configure(0, plan);
    CHECK(configured.ok(), configured.message());
  }

  void Step(std::vector<int64_t> dims = {2}, int team = 0) {
    int64_t count = 1;
    for (const int64_t dim : dims) count *= dim;
    const auto memory = std::make_shared<std::vector<float>>(count, ++step);
    Request request;
    request.name = "gradients";
    request.tensors.push_back({memory->data(), memory->data(), count, dims});
    teams.Step(team, std::move(request), nullptr, memory, [this, count](const StepGradients& got) {
      errors.push_back(got.status);
      if (!got.status.ok()) return;
      std::vector<float> values(count);
      got.Write(0, count, ddl::DType::kFloat32, values.data());
      for (const float value : values) CHECK(value == values[0], std::to_string(value));
      applied.push_back(values[0]);
    });
  }

  void Complete(const Status& status = Status()) {
    const Request request = std::move(submitted.front());
    submitted.erase(submitted.begin());
    CHECK(request.average && request.kind == Request::Kind::kAllReduce, "");
    float* values = static_cast<float*>(request.tensors[0].out);
    for (int64_t i = 0; i < request.tensors[0].count; ++i) values[i] *= 10;
    request.done(status);
  }

  // What `steps` steps apply that need not wait for anything.
  std::vector<float> Run(int steps) {
    for (int i = 0; i < steps; ++i) {
      Step();
      if (!submitted.empty()) Complete();
    }
    return applied;
  }
};

TeamPlan Plan(int64_t ksteps, int64_t max_steps, bool smooth = false) {
  return {smooth, ksteps, max_steps, 0};
}

std::string Text(const std::vector<float>& values) {
  std::string text;
  for (const float value : values) text += std::to_string(value) + " ";
  return text;
}

void ExpectApplied(const TeamPlan& plan, const std::vector<float>& expected) {
  Site site(plan);
  const std::vector<float> applied = site.Run(static_cast<int>(expected.size()));
  bool same = applied.size() == expected.size();
  for (size_t i = 0; same && i < expected.size(); ++i) {
    same = std::abs(applied[i] - expected[i]) < 1e-4f;
  }
  CHECK(same, "applied " + Text(applied) + "\n  expected " + Text(expected));
}

}  // namespace

TEST(teams_with_blocking_steps_alone_apply_each_steps_own_average) {
  ExpectApplied(Plan(5, 5), {10, 20, 30, 40, 50, 60, 70});  // and so beyond max_steps
  ExpectApplied(Plan(9, 5, true), {10, 20, 30, 40, 50, 60});
}

TEST(teams_with_a_warm_up_block_first_and_then_apply_the_step_before) {
  ExpectApplied(Plan(2, 6), {10, 20, 0, 30, 40, 50, 60});
  ExpectApplied(Plan(0, 6), {0, 10, 20, 30});
}

TEST(teams_with_a_cool_down_block_last) {
  ExpectApplied(Plan(-3, 6), {0, 10, 20, 40, 50, 60});
  ExpectApplied(Plan(-6, 6), {0, 10, 20, 30, 40, 50});
}

TEST(teams_with_a_smooth_transition_mix_the_two_steps) {
  std::vector<float> warm_up = {10, 20}, cool_down = {0, 10};
  for (int i = 1; i <= 11; ++i) {
    const float own = 10.f * (2 + i), previous = own - 10, second = i / 11.f;
    warm_up.push_back((1 - second) * own + second * previous);
    cool_down.push_back((1 - second) * previous + second * own);
  }
  warm_up.push_back(130);
  cool_down.push_back(140);
  ExpectApplied(Plan(2, 100, true), warm_up);
  ExpectApplied(Plan(-2, 100, true), cool_down);
  ExpectApplied(Plan(0, 100, true), {10, 20 * 9 / 11.f + 10 * 2 / 11.f});  // nothing lies before
}

TEST(teams_weight_of_previous_is_that_of_the_plan) {
  CHECK(ddl::WeightOfPrevious(Plan(3, 3), 1000) == 0, "");
  CHECK(ddl::WeightOfPrevious(Plan(3, 4), 3) == 0 && ddl::WeightOfPrevious(Plan(3, 4), 4) == 1, "");
  CHECK(ddl::WeightOfPrevious(Plan(-3, 4), 3) == 1 && ddl::WeightOfPrevious(Plan(-3, 4), 4) == 0,
        "");
  const TeamPlan smooth = Plan(3, 100, true);
  CHECK(ddl::WeightOfPrevious(smooth, 3) == 0 && ddl::WeightOfPrevious(smooth, 14) == 1, "");
  for (int step = 3; step < 14; ++step) {
    CHECK(ddl::WeightOfPrevious(smooth, step) < ddl::WeightOfPrevious(smooth, step + 1), "");
  }
}

TEST(teams_wait_for_their_own_average_in_a_blocking_step_only) {
  Site site(Plan(1, 9));
  site.Step();
  CHECK(site.applied.empty() && site.submitted.size() == 1, "a blocking step did not wait");
  site.Complete();
  CHECK(site.applied.size() == 1, "");
  site.Step();  // the first pipelined one
  CHECK(site.applied.back() == 0 && site.submitted.size() == 1, "it should not wait");
  site.Step();  // hands its own over at once, and waits for the one before
  CHECK(site.applied.size() == 2 && site.submitted.size() == 2, "");
  site.Complete();
  CHECK(site.applied.back() == 20 && site.submitted.size() == 1, Text(site.applied));
}

TEST(teams_send_nothing_that_no_step_will_apply) {
  Site site(Plan(-2, 9));
  site.Run(1);
  site.Step();  // the last pipelined one: the next applies its own
  CHECK(site.submitted.empty() && site.applied.back() == 10, "");
}

TEST(teams_tell_of_a_failure_in_the_step_that_would_apply_it) {
  Site site(Plan(0, 9));
  site.Step();
  site.Complete(Status(Code::kAborted, "rank 1 died"));
  CHECK(site.errors.back().ok(), "");
  site.Step();
  CHECK(site.errors.back().code() == Code::kAborted, site.errors.back().message());
}

TEST(teams_refuse_what_they_were_not_prepared_for) {
  const auto expect = [](const Status& status, Code code, const std::string& part) {
    CHECK(status.code() == code && status.message().find(part) != std::string::npos,
          status.message());
  };
  ddl::Teams early([](Request) {}, [](const std::string&) {});
  expect(early.Configure(0, Plan(1, 1)), Code::kFailedPrecondition, "before dl_comm.init()");
  Status status;
  early.Step(0, Request(), nullptr, nullptr,
             [&](const StepGradients& got) { status = got.status; });
  expect(status, Code::kFailedPrecondition, "ran before dl_comm.init()");

  Site site(Plan(0, 9));
  expect(site.teams.Configure(2, Plan(1, 1)), Code::kInvalidArgument, "there is no team 2");
  expect(site.teams.Configure(-1, Plan(1, 1)), Code::kInvalidArgument, "there is no team -1");
  site.Step({2}, 1);
  expect(site.errors.back(), Code::kFailedPrecondition, "team 1 is not configured");
  site.Step({5});
  expect(site.errors.back(), Code::kInvalidArgument, "5 elements, but dl_comm.init() was told of 4");
  site.Run(1);
  site.Step({2, 1});
  expect(site.errors.back(), Code::kInvalidArgument, "other shapes than those of the step before");
}

TEST(teams_that_are_configured_again_start_anew) {
  Site site(Plan(0, 9));
  site.Run(2);
  CHECK(site.teams.Configure(0, Plan(0, 9)).ok(), "");
  site.Step();
  CHECK(site.applied.back() == 0, Text(site.applied));
}

TEST(teams_report_every_so_many_steps) {
  Site site({false, 2, 6, 2});
  site.Run(5);
  CHECK(site.lines.size() == 2, std::to_string(site.lines.size()));
  CHECK(site.lines[0].find("dl_comm team 0 \"gradients\": step 2 of 6, blocking: 0.000 MB a step, "
                           "communication ") == 0,
        site.lines[0]);
  CHECK(site.lines[1].find("step 4 of 6, pipelined") != std::string::npos, site.lines[1]);
}

TEST(teams_are_completed_by_another_thread) {
  constexpr int kSteps = 2000;
  std::mutex mutex;
  std::deque<Request> submitted;
  ddl::Teams teams(
      [&](Request request) {
        std::lock_guard<std::mutex> lock(mutex);
        submitted.push_back(std::move(request));
      },
      [](const std::string&) {});
  teams.Prepare(1, 1);
  CHECK(teams.Configure(0, {true, 500, 1000, 1}).ok(), "");
  std::thread engine([&] {
    for (int completed = 0; completed < kSteps;) {
      Request request;
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (submitted.empty()) continue;
        request = std::move(submitted.front());
        submitted.pop_front();
      }
      *static_cast<float*>(request.tensors[0].out) *= 10;
      request.done(Status());
      ++completed;
    }
  });
  float last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const auto value = std::make_shared<float>(step);
    Request request;
    request.name = "gradients";
    request.tensors.push_back({value.get(), value.get(), 1, {1}});
    std::promise<float> applied;
    teams.Step(0, std::move(request), nullptr, value, [&applied](const StepGradients& got) {
      float result = 0;
      got.Write(0, 1, ddl::DType::kFloat32, &result);
      applied.set_value(result);
    });
    last = applied.get_future().get();
    CHECK(step > 500 || last == 10.f * step, std::to_string(last));
  }
  engine.join();
  CHECK(last == 10 * (kSteps - 1), std::to_string(last));
}

TEST(InATransitionTheSameIsAppliedByEveryThread) {
  constexpr int kCount = 9;  // one more than is converted at once
  for (const ddl::DType dtype :
       {ddl::DType::kFloat16, ddl::DType::kBfloat16, ddl::DType::kFloat32}) {
    uint32_t values[kCount] = {};  // subnormal numbers, of which the halves are, too
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bits = 2 * (i + 1);
      const size_t size = ddl::DTypeSize(dtype);
      std::memcpy(reinterpret_cast<char*>(values) + i * size, &bits, size);
    }
    const std::vector<ddl::TensorBuffer> tensors{{values, values, kCount, {kCount}}};
    StepGradients gradients;
    gradients.own = gradients.previous = std::make_shared<ddl::AsyncReduction>(tensors, nullptr);
    gradients.weight = 0.5;
    for (const bool flushes : {false, true}) {
      uint32_t applied[kCount] = {};
      bool keeps = false;
      std::thread([&] {
        if (flushes) FlushSubnormals();
        gradients.Write(0, kCount, dtype, applied);
        keeps = KeepsSubnormals();
      }).join();
      CHECK(std::memcmp(applied, values, sizeof(values)) == 0, ddl::DTypeName(dtype));
      CHECK(keeps != flushes, "the thread computes otherwise than before");
    }
  }
}

TEST(arithmetic_interpolates_every_reduced_dtype) {
  const float a[] = {0, -8, 4096}, b[] = {4, 8, -4096}, expected[] = {1, -4, 2048};
  for (const ddl::DType dtype : {ddl::DType::kFloat16, ddl::DType::kBfloat16}) {
    uint16_t from[3], to[3];
    float got[3];
    ddl::Narrow(a, from, 3, dtype);
    ddl::Narrow(b, to, 3, dtype);
    ddl::Interpolate(from, to, to, 3, dtype, 0.25);
    ddl::Widen(to, got, 3, dtype);
    CHECK(std::memcmp(got, expected, sizeof(got)) == 0, ddl::DTypeName(dtype));
  }
  const auto mixed = [&](auto zero, ddl::DType dtype) {
    using T = decltype(zero);
    const T from[] = {0, -8, 4096}, to[] = {4, 8, -4096};
    T got[3];
    ddl::Interpolate(from, to, got, 3, dtype, 0.25);
    for (int i = 0; i < 3; ++i) CHECK(got[i] == T(expected[i]), ddl::DTypeName(dtype));
  };
  mixed(float{}, ddl::DType::kFloat32);
  mixed(double{}, ddl::DType::kFloat64);
  mixed(int32_t{}, ddl::DType::kInt32);
  mixed(int64_t{}, ddl::DType::kInt64);
}
