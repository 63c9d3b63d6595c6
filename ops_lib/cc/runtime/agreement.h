#ifndef DDL_RUNTIME_AGREEMENT_H_
#define DDL_RUNTIME_AGREEMENT_H_

#include <chrono>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/status.h"
#include "runtime/negotiator.h"

namespace ddl {

// A tensor of at most kMaxOfferBytes.
struct SmallTensor {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  int divisor = 1;
};

// What the ranks agreed on.
enum class Accord {
  kRun,           // this collective, now
  kSummed,        // as kRun, and the small tensor that went with it is summed
  kAnotherFirst,  // the order differed: the negotiator knows rank 0's choice, which is next
};

// Lets the ranks agree, before each collective, that all of them are at the same one.
//
// Where ranks can meet (algorithms/meeting.h) they show each other a digest of the description, and
// a small tensor with it: one round for both. Only if the digests differ do they send descriptions.
//
// Elsewhere a star over rank 0: each rank sends its description, rank 0 compares and answers with a
// verdict, 2 (N - 1) small messages. Waiting polls with growing sleeps, because the cores belong to
// the training: an early rank must not take one from a late rank on the same host.
//
// Where only the order differs, the verdict says what rank 0 shows and what it has waiting behind
// that. Then the ranks go round the star once more with rank 0's choice; one that has not been
// asked for it yet comes as soon as it is, and tells rank 0 after a while what it has instead.
//
// A mismatch of ordered requests fails one collective and the group goes on. When a rank is missing
// for longer than the timeout, or has left, nothing can be in step again: that error is kept and
// answers every later call. So it is when a request that is not ordered fails: it ends a run of a
// graph on every rank, but how much else of the graph was submitted before differs, and what is left
// would meet requests of another run.
class Agreement {
 public:
  // `communicator` and `negotiator` must outlive this object.
  Agreement(Communicator* communicator, Negotiator* negotiator, double timeout_s);

  // On `request`, which the negotiator shows. Ok and the same accord on every rank, or the same
  // error on every rank:
  //   InvalidArgument     requests differ, and not in their order alone
  //   FailedPrecondition  a rank has left
  //   DeadlineExceeded    a rank did not come within the timeout
  //   Aborted             the process of a rank has died
  //   Unavailable         the request gave way; on the ranks that asked for it alone
  // `tensor`, if given, is summed on the way where ranks can meet; the description must tell all
  // about it.
  Status Agree(const Request& request, const SmallTensor* tensor, Accord* accord);

  // For a rank that has not been asked for rank 0's choice yet: call it every few milliseconds
  // instead of Agree. Not ok if the others have given up, or the choice has given way.
  Status Lack();

  // This error answers every later call. All ranks must come to it at the same request.
  void Break(const Status& reason);

  // Tells the others that this rank's script has ended and waits, without a timeout, until all
  // have left or the group is broken: the error says how, and is for those who stay.
  Status Leave();

 private:
  using Clock = std::chrono::steady_clock;
  struct Ask;

  Status AgreeOn(const Ask& ask, Accord* accord);
  Status AgreeOverRoot(const Ask& ask, Accord* accord);
  Status AgreeAsRoot(const Ask& ask, Accord* accord);
  Status AgreeAsMember(const Ask& ask, Accord* accord);
  Status SendToAll(const std::string& verdict);
  Status Fail(const Status& reason, bool breaks_group);
  Status Receive(const std::string& verdict, Accord* accord);

  Communicator* communicator_;
  Negotiator* negotiator_;
  double timeout_s_;
  Status broken_;
  bool negotiating_ = false;  // rank 0 has chosen, and what it has chosen has not run yet
  bool told_ = false;         // what this rank has instead
  // When all ranks were last known to be here, or to come.
  bool together_ = false;
  Clock::time_point together_at_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_AGREEMENT_H_
