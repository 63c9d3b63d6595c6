#ifndef DDL_ALGORITHMS_HOST_BARRIER_H_
#define DDL_ALGORITHMS_HOST_BARRIER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/reduction.h"
#include "core/status.h"
#include "transport/host_group.h"

namespace ddl {

// What a rank brings to a barrier.
struct Arrival {
  uint64_t digest[2] = {0, 0};  // of what this rank is about to do
  bool leaving = false;  // it has nothing more to do, ever
  bool without_request = false;  // it asks for no collective, and only has something to tell
  bool cancels = false;          // it cancels this barrier's collective, on all ranks
  std::function<std::string()> title;  // for messages: AllReduceN "loss/grads"
  // Set by another thread to cancel the request. Null: nobody will.
  const std::atomic<bool>* cancelled = nullptr;
  // Whether the timeout applies to this rank where it has no request, or has cancelled it; asked
  // now and then while it waits, and false lets the timeout begin anew. Null: it does.
  std::function<bool()> limited;
  // Called now and then while this rank waits, with the ranks that have arrived. May be null. An
  // error breaks the group.
  std::function<Status(const std::vector<bool>& arrived)> while_waiting;

  // A small tensor that is reduced inline, of at most kMaxInlineBytes; count 0 for none. Only read
  // where the digests match, so they must cover count, dtype and reduction too.
  const void* in = nullptr;
  void* out = nullptr;  // may equal `in`
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  Reduction reduction = 1;

  bool IsCancelled() const { return cancelled != nullptr && cancelled->load(); }
  // Whether the timeout applies to this rank's wait.
  bool IsLimited() const {
    if (leaving) return false;
    return !limited || (!without_request && !IsCancelled()) || limited();
  }
};

inline constexpr int64_t kMaxInlineBytes = sizeof(HostGroup::Slot::payload);

// How a barrier ends, the same on all ranks.
enum class BarrierResult {
  kMatch,      // the digests match: all are about to do the same; the inline tensors are reduced
  kMismatch,   // they do not
  kCancelled,  // a rank has cancelled its request before the last one arrived: nothing was done
};

// A barrier of all ranks of the host that compares what they are about to do. If the digests match,
// the inline tensors are reduced, in rank order.
//
// One round: each rank fills its slot and reads all others, (N - 1) * nbytes for each rank. For a
// tensor of a few elements that is one cache line from each peer. A slot is free again after the
// next barrier, because all have read it when they arrive there; hence two for each rank. From 8
// KiB on the values are written through the caches or past them, as StoreChoice says.
//
// The same error on every rank, and the group is broken:
//   FailedPrecondition  a rank leaves while another does not
//   DeadlineExceeded    no rank arrived for as long as the timeout, and one is missing. It counts
//                       from the last arrival, so that a chain of waits is no stall. A warning
//                       comes earlier, from the first rank that has arrived
//   Aborted             a missing rank has died
// The timeout does not apply to ranks that leave.
Status HostBarrier(HostGroup* group, const Arrival& arrival, BarrierResult* result);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_HOST_BARRIER_H_
