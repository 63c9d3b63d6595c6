#include "transport/host_channels.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace ddl {

HostChannels::HostChannels(HostGroup* first, const std::vector<void*>& others,
                           std::vector<int> global_ranks)
    : first_(first), others_(others.size()) {
  for (size_t i = 0; i < others.size(); ++i) {
    Other& other = others_[i];
    other.thread = std::make_unique<Worker>("ddl-channel-" + std::to_string(i + 1));
    // The kernel releases what this thread holds, when it ends.
    other.thread->Submit([&other, first, base = others[i], &global_ranks] {
      other.group = std::make_unique<HostGroup>(base, first->rank(), first->size(),
                                                first->timeout_s(), global_ranks);
      return Status();
    });
    if (const Status joined = AwaitOthers(); !joined.ok()) {
      throw std::runtime_error(joined.message());
    }
  }
}

// The thread ends when it has done this.
HostChannels::Other::~Other() {
  if (group == nullptr) return;
  thread->Submit([this] {
    group.reset();
    return Status();
  });
}

Status HostChannels::AwaitOthers() {
  Status first;
  for (Other& other : others_) {
    while (other.thread != nullptr && other.thread->pending() > 0) {
      Status status;
      if (other.thread->Await(1, &status) && first.ok()) first = std::move(status);
    }
  }
  return first;
}

Status HostChannels::Break(const Status& reason) {
  const Status why = first_->Break(reason, 0);
  for (Other& other : others_) (void)other.group->Break(why, 0);
  return why;
}

Status HostChannels::Run(int64_t nbytes, const Work& work) {
  const int channels = static_cast<int>(std::clamp<int64_t>(nbytes / kChannelBytes, 1, size()));
  if (channels == 1) return work(first_, 0, 1);
  try {
    for (int channel = 1; channel < channels; ++channel) {
      others_[channel - 1].thread->Submit(
          [&, channel] { return RunChannel(work, channel, channels); });
    }
    (void)RunChannel(work, 0, channels);
  } catch (...) {
    // Those that have begun use what is the caller's.
    (void)Break(Status(Code::kInternal, "a thread of the rank could not begin."));
    (void)AwaitOthers();
    throw;
  }
  // An error that a channel has thrown instead of breaking the others breaks them here.
  const Status others = AwaitOthers();
  return others.ok() ? first_->status() : Break(others);
}

Status HostChannels::RunChannel(const Work& work, int channel, int channels) {
  HostGroup* const group = channel == 0 ? first_ : others_[channel - 1].group.get();
  Status status;
  try {
    status = work(group, channel, channels);
  } catch (const std::exception& error) {
    status =
        Status(Code::kInternal, std::string("a thread of a rank could not go on: ") + error.what());
  }
  return status.ok() ? status : Break(status);
}

}  // namespace ddl
