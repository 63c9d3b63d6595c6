#ifndef DDL_RUNTIME_AGREEMENT_H_
#define DDL_RUNTIME_AGREEMENT_H_

#include <chrono>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/status.h"

namespace ddl {

// Lets the ranks agree, before each collective, that all of them are at the same one. There is no
// negotiation of order: requests run as they come, and a difference is an error on every rank.
//
// A star over rank 0: each rank sends its description, rank 0 compares and answers with a verdict,
// 2 (N - 1) small messages. Waiting polls with growing sleeps, because the cores belong to the
// training: an early rank must not take one from a late rank on the same host.
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
  Status Agree(const std::string& description);

  // Tells the others that this rank's script has ended and waits, without a timeout, until all
  // have left or the group is broken.
  void Leave();

 private:
  Status AgreeAsRoot(const std::string& description);
  Status AgreeAsMember(const std::string& description);
  Status SendVerdict(const Status& verdict, bool breaks_group);
  std::string Missing(const std::vector<bool>& arrived) const;

  Communicator* communicator_;
  double timeout_s_;
  Status broken_;
  // When rank 0 last answered.
  bool verdict_sent_ = false;
  std::chrono::steady_clock::time_point verdict_sent_at_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_AGREEMENT_H_
