#ifndef DDL_TRANSPORT_HOST_LANES_H_
#define DDL_TRANSPORT_HOST_LANES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/status.h"
#include "core/worker.h"
#include "transport/host_group.h"

namespace ddl {

// Several threads of each rank of a host, for what is large. Lane t joins thread t of every rank by a
// HostGroup of its own, so lanes share nothing and wait for nobody but each other's ranks: each does
// a part of the work as a rank with one thread does the whole. The first lane is the thread that
// calls; the others sleep until they are called.
//
// An error of one lane breaks them all, on all ranks.
class HostLanes {
 public:
  // A part of something: `lane` of `lanes`.
  using Work = std::function<Status(HostGroup* group, int lane, int lanes)>;

  // Bytes that pay for a lane more: some 0.2 ms of one thread, where to wake another takes 0.05.
  static constexpr int64_t kLaneBytes = int64_t{1} << 20;

  // `first`: the group of the calling thread, which outlives this object, as do the `others`: memory
  // of a group for each lane more, formatted. `names`: see HostGroup. Throws std::system_error if a
  // thread cannot start, std::runtime_error if it cannot join.
  HostLanes(HostGroup* first, const std::vector<void*>& others, std::vector<int> names = {});
  HostLanes(const HostLanes&) = delete;

  int size() const { return 1 + static_cast<int>(others_.size()); }

  // `work` on as many lanes as pay for `nbytes`, which are the same on all ranks. An error is that of
  // the first lane's group, the same on all ranks.
  Status Run(int64_t nbytes, const Work& work);

  // Breaks all groups; as HostGroup::Break. Any thread may call it.
  Status Break(const Status& reason);

 private:
  struct Other {
    ~Other();

    std::unique_ptr<HostGroup> group;  // made and destroyed by the thread
    std::unique_ptr<Worker> thread;
  };
  Status RunLane(const Work& work, int lane, int lanes);
  // Until none of the others is at work. The first error of one, or ok.
  Status AwaitOthers();

  HostGroup* const first_;
  std::vector<Other> others_;
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_HOST_LANES_H_
