#include "transport/host_lanes.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

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
    if (const Status joined = AwaitOthers(); !joined.ok()) {
      throw std::runtime_error(joined.message());
    }
  }
}

// The thread ends when it has done this.
HostLanes::Other::~Other() {
  if (group == nullptr) return;
  thread->Begin([this] {
    group.reset();
    return Status();
  });
}

Status HostLanes::AwaitOthers() {
  Status first;
  for (Other& other : others_) {
    while (other.thread != nullptr && other.thread->pending() > 0) {
      Status status;
      if (other.thread->Await(1, &status) && first.ok()) first = std::move(status);
    }
  }
  return first;
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
    (void)AwaitOthers();
    throw;
  }
  // An error that a lane has thrown instead of breaking the others breaks them here.
  const Status others = AwaitOthers();
  return others.ok() ? first_->status() : Break(others);
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
