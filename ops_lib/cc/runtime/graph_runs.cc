#include "runtime/graph_runs.h"

#include <algorithm>
#include <utility>

#include "runtime/description.h"

namespace ddl {
namespace {

using Pending = CancelledRun::Pending;

// Requests of a run that has failed may still be submitted, by an executor that does not know yet.
constexpr size_t kRemembered = 256;
// A run that has had none of so many collectives is known by what is pending.
constexpr int64_t kCollectivesRemembered = 4096;

Status CancelledBy(const std::string& reason, const std::string& title) {
  return Status(Code::kFailedPrecondition, title + ": " + reason);
}

}  // namespace

GraphRuns::GraphRuns(RequestQueue* queue, Clock::duration most_held)
    : queue_(queue), most_held_(most_held), ran_(kCollectivesRemembered) {}

void GraphRuns::Ran(int64_t run) { ran_[ran_count_++ % kCollectivesRemembered] = run; }

bool GraphRuns::HasFailed(int64_t run) const {
  return run != 0 && std::any_of(failed_.begin(), failed_.end(),
                                 [run](const FailedRun& failed) { return failed.run == run; });
}

void GraphRuns::Fail(int64_t run, const Status& status) {
  if (run == 0 || HasFailed(run)) return;
  failed_.push_back({run, status});
  if (failed_.size() > kRemembered) failed_.pop_front();
  const auto of_it = [run](const Request& request) { return request.run == run; };
  for (Request& request : queue_->Extract(of_it)) request.done(status);
  std::vector<Request> held;
  held.swap(held_);
  for (Request& request : held) {
    if (of_it(request)) {
      request.done(status);
    } else {
      held_.push_back(std::move(request));
    }
  }
}

void GraphRuns::Add(Request request) {
  for (const FailedRun& failed : failed_) {
    if (request.run == 0 || failed.run != request.run) continue;
    request.done(failed.status);
    return;
  }
  if (request.kind == Request::Kind::kJoin) {
    AwaitNothing();  // of those runs comes no more
  } else if (IsJoining()) {
    const Status status(Code::kFailedPrecondition,
                        Title(request) + ": another thread of this rank has joined. A rank joins "
                        "as a whole: call ddl.join() once, after its other threads have ended.");
    Fail(request.run, status);
    request.done(status);
    return;
  }
  for (auto awaited = awaited_.begin(); awaited != awaited_.end();) {
    if (IsOf(request, &*awaited)) {
      const Status status = CancelledBy(awaited->reason, Title(request));
      awaited_.erase(awaited);
      Fail(request.run, status);
      request.done(status);
      Release();
      return;
    }
    awaited = awaited->pending.empty() ? awaited_.erase(awaited) : awaited + 1;
  }
  if (HoldingOf(request) != awaited_.end()) {
    Hold(std::move(request));
  } else {
    queue_->Add(std::move(request));
  }
}

bool GraphRuns::IsJoining() const {
  // Add lets nothing come after it.
  return !queue_->empty() && queue_->pending().back().kind == Request::Kind::kJoin;
}

int64_t GraphRuns::PositionOf(int64_t run) const {
  const int64_t oldest = std::max<int64_t>(0, ran_count_ - kCollectivesRemembered);
  for (int64_t at = ran_count_ - 1; at >= oldest && run != 0; --at) {
    if (ran_[at % kCollectivesRemembered] == run) return at;
  }
  return -1;
}

CancelledRun GraphRuns::Identify(const Request& request) const {
  CancelledRun run;
  run.position = PositionOf(request.run);
  if (run.position >= 0) return run;
  const std::deque<Request>& pending = queue_->pending();
  for (auto one = pending.begin(); one != pending.end(); ++one) {
    const bool of_it = request.run == 0 ? &*one == &request : one->run == request.run;
    if (!of_it) continue;
    Pending identified{{Title(*one), one->ordered, one->stream}, 0};
    bool first = true;
    for (auto before = pending.begin(); before != one; ++before) {
      if (before->stream != one->stream || before->ordered != one->ordered) continue;
      if (!one->ordered && Title(*before) != identified.id.title) continue;
      ++identified.ahead;
      if (request.run != 0 && before->run == request.run) first = false;
    }
    if (first) run.pending.push_back(std::move(identified));
  }
  return run;
}

void GraphRuns::CancelElsewhere(const CancelledRun& run) {
  if (run.position >= 0) {
    if (run.position >= ran_count_ - kCollectivesRemembered) {
      Fail(ran_[run.position % kCollectivesRemembered],
           Status(Code::kFailedPrecondition, run.reason));
    }
    return;
  }
  CancelledRun awaited = run;
  for (const Request& request : queue_->pending()) {
    if (!IsOf(request, &awaited)) continue;
    const Status status = CancelledBy(awaited.reason, Title(request));
    if (request.run != 0) {
      Fail(request.run, status);
    } else {
      const auto is_it = [&](const Request& one) { return &one == &request; };
      for (Request& one : queue_->Extract(is_it)) one.done(status);
    }
    return;
  }
  for (const Request& request : held_) {
    if (!IsOf(request, &awaited)) continue;
    Fail(request.run, CancelledBy(awaited.reason, Title(request)));
    return;
  }
  if (awaited.pending.empty() || IsJoining()) return;  // nothing more comes of a rank that joins
  if (awaited_.size() == kRemembered) awaited_.erase(awaited_.begin());
  awaited_.push_back(std::move(awaited));
  const auto held = [this](const Request& one) { return HoldingOf(one) != awaited_.end(); };
  for (Request& request : queue_->Extract(held)) Hold(std::move(request));
}

bool GraphRuns::IsOf(const Request& request, CancelledRun* awaited) const {
  for (auto one = awaited->pending.begin(); one != awaited->pending.end();) {
    const bool same_title = one->id.title == Title(request);
    if (one->id.stream != request.stream ||
        (one->id.ordered ? !request.ordered : !same_title)) {
      ++one;
    } else if (one->ahead > 0) {
      --one->ahead;
      ++one;
    } else if (same_title && PositionOf(request.run) < 0) {
      return true;
    } else {
      one = awaited->pending.erase(one);  // of a later run: that one ended here before it
    }
  }
  return false;
}

std::vector<CancelledRun>::iterator GraphRuns::HoldingOf(const Request& request) {
  if (awaited_.empty() || request.ordered || request.run == 0) return awaited_.end();
  if (PositionOf(request.run) >= 0) return awaited_.end();
  return std::find_if(awaited_.begin(), awaited_.end(), [&](const CancelledRun& awaited) {
    return std::any_of(awaited.pending.begin(), awaited.pending.end(), [&](const Pending& one) {
      return !one.id.ordered && one.id.stream == request.stream;
    });
  });
}

void GraphRuns::Hold(Request request) {
  if (held_.empty()) held_since_ = Clock::now();
  held_.push_back(std::move(request));
}

std::optional<GraphRuns::Clock::time_point> GraphRuns::HeldUntil() const {
  if (held_.empty()) return std::nullopt;
  return held_since_ + most_held_;
}

void GraphRuns::FailHeld() {
  const Request& oldest = held_.front();
  // Else it is released: it has had a collective since, or there was no memory to release it.
  if (const auto holding = HoldingOf(oldest); holding != awaited_.end()) {
    const Status status = CancelledBy(holding->reason, Title(oldest));
    awaited_.erase(holding);
    Fail(oldest.run, status);
  }
  Release();
}

void GraphRuns::DropHeld() {
  while (true) {
    const auto cancelled = std::find_if(held_.begin(), held_.end(),
                                        [](const Request& one) { return one.IsCancelled(); });
    if (cancelled == held_.end()) return;
    if (const auto holding = HoldingOf(*cancelled); holding != awaited_.end()) {
      awaited_.erase(holding);
    }
    Fail(cancelled->run,
         Status(Code::kCancelled, Title(*cancelled) + ": its run was cancelled."));
    Release();
  }
}

void GraphRuns::AwaitNothing() {
  awaited_.clear();
  Release();
}

void GraphRuns::Release() {
  std::vector<Request> held;
  held.swap(held_);
  const Clock::time_point since = held_since_;
  for (Request& request : held) Add(std::move(request));
  held_since_ = since;
}

}  // namespace ddl
