#ifndef DDL_ALGORITHMS_MEETING_H_
#define DDL_ALGORITHMS_MEETING_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"
#include "transport/host_group.h"

namespace ddl {

// What a rank brings to a meeting.
struct Offer {
  uint64_t digest[2] = {0, 0};  // of what this rank is about to do
  bool leaving = false;         // it has nothing more to do, ever
  bool asks_nothing = false;    // it only has something to say
  bool withdraws = false;       // it takes back whatever it shows: no rank is to do anything
  std::function<std::string()> title;  // for messages: AllReduceN "loss/grads"
  // Set by another thread that does not want it any more. Null: nobody will.
  const std::atomic<bool>* withdrawn = nullptr;
  // Whether it matters how long this rank waits, where it asks for nothing, or not any more. Null: it
  // does.
  std::function<bool()> limited;
  // Called now and then while this rank waits, with who has come. Null: nobody wants to know. An
  // error breaks the group.
  std::function<Status(const std::vector<bool>& here)> waiting;

  // A small tensor to be summed on the way, of at most kMaxOfferBytes; count 0 for none. Only
  // looked at where all digests are equal, so they must tell count, dtype and divisor too.
  const void* in = nullptr;
  void* out = nullptr;  // may equal `in`
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  int divisor = 1;

  bool IsWithdrawn() const { return withdrawn != nullptr && withdrawn->load(); }
  // Whether this rank waits no longer than the timeout.
  bool IsLimited() const {
    if (leaving) return false;
    return !limited || (!asks_nothing && !IsWithdrawn()) || limited();
  }
};

inline constexpr int64_t kMaxOfferBytes = sizeof(HostGroup::Slot::payload);

// What a meeting comes to, the same on all ranks.
enum class Met {
  kAlike,      // all are about to do the same; the offered tensors are summed
  kDifferent,
  kWithdrawn,  // a rank has taken back what it showed before the last one came: nothing was done
};

// All ranks of the host show each other what they are about to do. If it is the same, the offered
// tensors are summed, in rank order, and divided.
//
// One round: each rank fills its slot and reads all others, (N - 1) * nbytes for each rank. For a
// tensor of a few elements that is one cache line from each peer. A slot is free again after the
// next meeting, because all have read it when they show their next one; hence two turns. From 8 KiB
// on the values are written through the caches or past them, as StoreChoice says.
//
// The same error on every rank, and the group is broken:
//   FailedPrecondition  a rank leaves while another does not
//   DeadlineExceeded    nobody came for as long as the timeout, and a rank is missing. It counts
//                       from the last arrival, so that a chain of waits is no stall. A warning
//                       comes earlier, from the first rank that is there
//   Aborted             a missing rank has died
// Leaving ranks wait without a limit.
Status Meet(HostGroup* group, const Offer& offer, Met* met);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_MEETING_H_
