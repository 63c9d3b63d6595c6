#ifndef DDL_RUNTIME_AGREEMENT_H_
#define DDL_RUNTIME_AGREEMENT_H_

#include <chrono>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/status.h"

namespace ddl {

// A tensor of at most kMaxOfferBytes.
struct SmallTensor {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  int divisor = 1;
};

// Lets the ranks agree, before each collective, that all of them are at the same one. There is no
// negotiation of order: requests run as they come, and a difference is an error on every rank.
//
// Where ranks can meet (algorithms/meeting.h) they show each other a digest of the description, and
// a small tensor with it: one round for both. Only if the digests differ do they send descriptions.
//
// Elsewhere a star over rank 0: each rank sends its description, rank 0 compares and answers with a
// verdict, 2 (N - 1) small messages. Waiting polls with growing sleeps, because the cores belong to
// the training: an early rank must not take one from a late rank on the same host.
//
// A mismatch fails one collective and the group goes on. When a rank is missing for longer than
// the timeout, or has left, nothing can be in step again: that error is kept and answers every
// later call.
class Agreement {
 public:
  // `communicator` must outlive this object.
  Agreement(Communicator* communicator, double timeout_s);

  // Ok on every rank, or the same error on every rank:
  //   InvalidArgument     descriptions differ
  //   FailedPrecondition  a rank has left
  //   DeadlineExceeded    a rank did not come within the timeout
  //   Aborted             the process of a rank has died
  // `tensor`, if given, is summed on the way: only where ranks can meet, and the description must
  // tell all about it.
  Status Agree(const std::string& description, const SmallTensor* tensor = nullptr);

  // Tells the others that this rank's script has ended and waits, without a timeout, until all
  // have left or the group is broken: the error says how, and is for those who stay.
  Status Leave();

 private:
  Status AgreeInMeeting(const std::string& description, const SmallTensor* tensor);
  Status AgreeOverRoot(const std::string& description);
  Status AgreeAsRoot(const std::string& description);
  Status AgreeAsMember(const std::string& description);
  Status SendVerdict(const Status& verdict, bool breaks_group);

  Communicator* communicator_;
  double timeout_s_;
  Status broken_;
  // When rank 0 last answered.
  bool verdict_sent_ = false;
  std::chrono::steady_clock::time_point verdict_sent_at_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_AGREEMENT_H_
