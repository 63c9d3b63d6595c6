#ifndef DDL_COMM_HOST_MEMORY_H_
#define DDL_COMM_HOST_MEMORY_H_

#include <memory>
#include <vector>

#include "algorithms/all_to_all.h"
#include "comm/communicator.h"
#include "transport/host_group.h"
#include "transport/host_channels.h"
#include "transport/shared_segment.h"

namespace ddl {

// The ranks of this host around memory that they share.
struct HostMemory {
  SharedSegment segment;
  std::unique_ptr<HostGroup> group;  // lives in `segment`, as those of `channels`
  std::unique_ptr<HostChannels> channels;  // the first is `group`
};

// Shares memory among the ranks r with the same hosts[r], on each host. Collective over `base`. If
// some rank of some host cannot, `memory` stays empty on every rank; then `why` tells what went
// wrong on this one, if it was this one.
//
// `threads`: how many of this rank may work at once. All ranks of a host have as many as the one
// that may have the fewest; half as many, and so on, if there is no memory for so many. Then `why`
// tells that on the host's first rank.
Status ShareMemory(Communicator* base, const std::vector<int>& hosts, int threads, double timeout_s,
                   std::unique_ptr<HostMemory>* memory, Status* why);

// The part of `exchange` that is between the ranks of this host, which are `here`.
Status AllToAllThrough(HostChannels* channels, const void* in, void* out, const Exchange& exchange,
                       const std::vector<int>& here);

}  // namespace ddl

#endif  // DDL_COMM_HOST_MEMORY_H_
