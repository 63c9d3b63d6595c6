#ifndef DDL_TRANSPORT_HOST_CHANNELS_H_
#define DDL_TRANSPORT_HOST_CHANNELS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/status.h"
#include "core/worker.h"
#include "transport/host_group.h"

namespace ddl {

// Several threads of each rank of a host, for what is large. Like the channels of NCCL, they move
// parts of a tensor at once: channel t joins thread t of every rank by a HostGroup of its own, so
// channels share nothing and do not wait for each other. Each does its part as a rank with one
// thread does the whole. The first channel is the thread that calls; the others sleep until they
// are called.
//
// An error of one channel breaks them all, on all ranks.
class HostChannels {
 public:
  // A part of something: `channel` of `channels`.
  using Work = std::function<Status(HostGroup* group, int channel, int channels)>;

  // Bytes that are worth one more channel: some 0.2 ms of one thread, where waking another takes
  // 0.05 ms.
  static constexpr int64_t kChannelBytes = int64_t{1} << 20;

  // `first`: the group of the calling thread, which outlives this object, as do the `others`:
  // memory of a group for each further channel, formatted. `global_ranks`: see HostGroup. Throws
  // std::system_error if a thread cannot start, std::runtime_error if it cannot join.
  HostChannels(HostGroup* first, const std::vector<void*>& others,
               std::vector<int> global_ranks = {});
  HostChannels(const HostChannels&) = delete;

  int size() const { return 1 + static_cast<int>(others_.size()); }

  // Runs `work` on as many channels as `nbytes` are worth, which are the same on all ranks. An
  // error is that of the first channel's group, the same on all ranks.
  Status Run(int64_t nbytes, const Work& work);

  // Breaks all groups; as HostGroup::Break. Any thread may call it.
  Status Break(const Status& reason);

 private:
  struct Other {
    ~Other();

    std::unique_ptr<HostGroup> group;  // made and destroyed by the thread
    std::unique_ptr<Worker> thread;
  };
  Status RunChannel(const Work& work, int channel, int channels);
  // Until none of the others is at work. The first error of one, or ok.
  Status AwaitOthers();

  HostGroup* const first_;
  std::vector<Other> others_;
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_HOST_CHANNELS_H_
