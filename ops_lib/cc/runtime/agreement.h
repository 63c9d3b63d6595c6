#ifndef DDL_RUNTIME_AGREEMENT_H_
#define DDL_RUNTIME_AGREEMENT_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/status.h"
#include "runtime/negotiator.h"
#include "runtime/proposal.h"

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
struct Accord {
  enum class Kind {
    kRun,        // this collective, now
    kSummed,     // as kRun, and the small tensor that went with it is summed
    kAgain,      // nothing: each rank proposes again. Where the order differed, the negotiator knows
                 // the choice, which is next
    kAllJoined,  // every rank has joined
  };

  Kind kind = Kind::kRun;
  int contributors = 0;     // of kRun: ranks that have not joined; 0: all
  std::string description;  // of kRun, where a rank has joined: what the others run
  int last_joined = 0;      // of kAllJoined
};

// Lets the ranks agree, before each collective, that all of them are at the same one.
//
// They meet (algorithms/meeting.h, comm/dissemination_barrier.h) and show each other a digest of the
// request; within a host a small tensor goes with it, one round for both.
//
// Only if the digests differ do they send proposals, in a star over rank 0: each rank sends its own,
// rank 0 compares and answers with a verdict, 2 (N - 1) small messages. Waiting polls with growing
// sleeps, because the cores belong to the training: an early rank must not take one from a late rank
// on the same host.
//
// Where only the order differs, the verdict says what rank 0 shows and what it has waiting behind
// that. Then the ranks go round the star once more with rank 0's choice; one that has not been
// asked for it yet comes as soon as it is, and tells rank 0 after a while what it has instead.
//
// An error belongs to one request: what does not fit fails on every rank, and the group goes on. It
// also fails what else belongs to its run, on every rank at this point, whether it was submitted
// there already or not: so no rank has anything left of that run that could meet a later one. (The
// engine sees to that.)
//
// A rank that gives up a run by itself, because something else in it failed there (Withdraw), is in
// a new generation from then on, which is part of what is compared. So what the others still propose
// of that run fails there, with the reason, and brings them to the same generation.
//
// When a rank is missing for longer than the timeout, or has left, nothing can be in step again: that
// error is kept and answers every later call.
class Agreement {
 public:
  // `communicator` and `negotiator` must outlive this object. `limited`: see Offer.
  Agreement(Communicator* communicator, Negotiator* negotiator, double timeout_s,
            std::function<bool()> limited = {});

  // On `request`, which the negotiator shows, or a kNotice. Ok and the same accord on every rank, or
  // an error:
  //   InvalidArgument     requests differ, and not in their order alone; on every rank
  //   FailedPrecondition  a rank has left, or has given up the run; on every rank that did not
  //   DeadlineExceeded    a rank did not come within the timeout
  //   Aborted             the process of a rank has died
  //   Unavailable         the request gave way; on the ranks that asked for it alone
  // `tensor`, only where the communicator sums offers, is summed on the way; the signature must tell
  // all about it.
  Status Agree(const Request& request, const SmallTensor* tensor, Accord* accord);

  // For a rank that has not been asked for rank 0's choice yet: call it every few milliseconds
  // instead of Agree. Not ok if the others have given up, or the choice is none any more.
  Status Lack();

  // This rank gives up a run of which others may still propose something. `reason`: a sentence for
  // them.
  void Withdraw(const std::string& reason);
  // Whether the others may not know of it: then a kNotice tells them.
  bool HasNotice() const { return notice_ && broken_.ok(); }

  // This error answers every later call. All ranks must come to it.
  void Break(const Status& reason);

  // Tells the others that this rank's script has ended and waits, without a timeout, until all
  // have left or the group is broken: the error says how, and is for those who stay.
  Status Leave();

 private:
  using Clock = std::chrono::steady_clock;

  // `different`: proposals have to be compared.
  Status MeetOn(const Request& request, const SmallTensor* tensor, Accord* accord,
                bool* different);
  // `request`: what the proposal is made of; null where this rank leaves.
  Status AgreeOverRoot(const Proposal& proposal, const Request* request, Accord* accord);
  Status AgreeAsRoot(const Proposal& proposal, const Request* request, Accord* accord);
  Status AgreeAsMember(const Proposal& proposal, const Request* request, Accord* accord);
  // Rank 0's answer to all proposals: what it sends, and then takes for itself.
  std::string Verdict(const Decision& decision, const std::vector<Proposal>& proposals) const;
  Status SendToAll(const std::string& verdict);
  Status Fail(const Status& reason, bool breaks_group);
  // Does what a verdict says about this rank's own proposal; null: it has none.
  Status Apply(const std::string& verdict, const Proposal* proposal, Accord* accord);
  Proposal Propose(const Request& request) const;

  Communicator* communicator_;
  Negotiator* negotiator_;
  double timeout_s_;
  std::function<bool()> limited_;
  Status broken_;
  int64_t generation_ = 0;
  std::string reason_;  // for which this rank came to it
  bool notice_ = false;
  bool joined_ = false;       // a kJoin has been proposed, and not all have joined
  bool negotiating_ = false;  // rank 0 has chosen, and what it has chosen has not run yet
  bool told_ = false;         // what this rank has instead
  std::vector<int64_t> proposed_;  // of each rank: how many proposals went to rank 0
  // When all ranks were last known to be here, or to come.
  Clock::time_point together_at_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_AGREEMENT_H_
