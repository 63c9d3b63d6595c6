#include "transport/host_lanes.h"

#include <algorithm>
#include <exception>
#include <string>

namespace ddl {

HostLanes::HostLanes(HostGroup* first, const std::vector<void*>& others, std::vector<int> names)
    : first_(first), others_(others.size()) {
  for (size_t i = 0; i < others.size(); ++i) {
    Other& other = others_[i];
    other.thread = std::make_unique<Worker>("ddl-lane-" + std::to_string(i + 1));
    // The kernel releases what this thread holds, when it ends.
    other.thread->Begin([&other, first, base = others[i], &names] {
      other.group = std::make_unique<HostGroup>(base, first->rank(), first->size(),
                                                first->timeout_s(), names);
      return Status();
    });
    AwaitOthers();
  }
}

HostLanes::~HostLanes() {
  for (Other& other : others_) {
    other.thread->Begin([&other] {
      other.group.reset();
      return Status();
    });
  }
  AwaitOthers();
}

void HostLanes::AwaitOthers() {
  Status status;
  for (Other& other : others_) {
    while (other.thread != nullptr && other.thread->pending() > 0) {
      (void)other.thread->Await(1, &status);
    }
  }
}

Status HostLanes::Break(const Status& reason) {
  const Status why = first_->Break(reason, 0);
  for (Other& other : others_) (void)other.group->Break(why, 0);
  return why;
}

Status HostLanes::Run(int64_t nbytes, const Work& work) {
  const int lanes = static_cast<int>(std::clamp<int64_t>(nbytes / kLaneBytes, 1, size()));
  if (lanes == 1) return work(first_, 0, 1);
  try {
    for (int lane = 1; lane < lanes; ++lane) {
      others_[lane - 1].thread->Begin([&, lane] { return RunLane(work, lane, lanes); });
    }
    (void)RunLane(work, 0, lanes);
  } catch (...) {
    // Those that have begun use what is the caller's.
    (void)Break(Status(Code::kInternal, "a thread of the rank could not begin."));
    AwaitOthers();
    throw;
  }
  AwaitOthers();
  return first_->status();
}

Status HostLanes::RunLane(const Work& work, int lane, int lanes) {
  HostGroup* const group = lane == 0 ? first_ : others_[lane - 1].group.get();
  Status status;
  try {
    status = work(group, lane, lanes);
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, std::string("a thread of a rank could not go on: ") +
                                         error.what());
  }
  return status.ok() ? status : Break(status);
}

}  // namespace ddl
