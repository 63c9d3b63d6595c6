#ifndef DDL_RUNTIME_AGREEMENT_H_
#define DDL_RUNTIME_AGREEMENT_H_

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/stall.h"
#include "core/status.h"
#include "runtime/cancelled_run.h"
#include "runtime/request_queue.h"
#include "runtime/proposal.h"

namespace ddl {

// A tensor of at most kMaxInlineBytes.
struct InlineTensor {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  Reduction reduction = 1;
};

// What the ranks agreed to do.
struct Action {
  enum class Kind {
    kRun,        // this collective, now
    kReduced,    // as kRun, and the inline tensor is reduced
    kRetry,      // nothing: each rank proposes again; after a difference in order, rank 0's choice
    kAllJoined,  // every rank has joined
  };

  Kind kind = Kind::kRun;
  int contributors = 0;     // of kRun: ranks that have not joined; 0: all
  std::string description;  // of kRun, where a rank has joined: what the others run
  int last_joined = 0;      // of kAllJoined
};

// Lets the ranks agree, before each collective, that all of them are at the same one.
//
// A barrier (algorithms/host_barrier.h, comm/dissemination_barrier.h) compares digests of the
// request; within a host a small tensor is reduced inline, one round for both.
//
// Only if the digests differ do they send proposals, to rank 0, the coordinator: it compares them
// and answers with a response, 2 (N - 1) small messages. Waiting polls with growing sleeps, because
// the cores belong to the training: an early rank must not take one from a late rank on the same
// host.
//
// Where only the order differs, the response says what rank 0 proposes and what is pending behind
// that. Then the ranks agree through rank 0 once more, on its choice; a rank to which that has not
// been submitted yet proposes it as soon as it is, and meanwhile reports to rank 0 what it has
// pending.
//
// An error belongs to one request: what does not match fails on every rank, and the group goes on.
// It also fails what else belongs to its run, on every rank at this point, whether it was submitted
// there already or not: so no rank has anything left of that run that could be matched with a later
// one. (The engine does that.)
//
// What a rank has cancelled by itself, because something else in that run failed there (CancelRun),
// is a part of what is compared, until all ranks know it. So what the others propose differs; they
// learn which runs were cancelled (TakeCancelled), fail theirs, and all propose again.
//
// When a rank is missing for longer than the timeout, or has left, the ranks cannot get back into
// step: that error is kept and answers every later call.
class Agreement {
 public:
  // `communicator` and `queue` must outlive this object. `limited`: see Arrival.
  Agreement(Communicator* communicator, RequestQueue* queue, double timeout_s,
            std::function<bool()> limited = {});

  // On `request`, which the queue has given as next, or a kCancelNotice. Ok and the same action on
  // every rank, or an error:
  //   InvalidArgument     requests differ, and not in their order alone; on every rank
  //   FailedPrecondition  a rank has left; on every rank that did not
  //   DeadlineExceeded    a rank did not come within the timeout
  //   Aborted             the process of a rank has died
  //   Unavailable         the request is optional and was dropped; on the ranks that have it alone
  // `tensor`, only where the communicator reduces inline, is reduced with the comparison; the
  // signature must cover it.
  Status Agree(const Request& request, const InlineTensor* tensor, Action* action);

  // For a rank to which rank 0's choice has not been submitted yet: call it every few milliseconds
  // instead of Agree. Not ok if the others have given up, or rank 0 has dropped its choice.
  Status PollWhileMissing();

  // This rank has cancelled a run of which others may still propose something.
  void CancelRun(CancelledRun run);
  // Whether the others may not know of one: then a kCancelNotice tells them.
  bool HasCancelNotice() const { return !cancelled_.empty() && broken_.ok(); }
  // Whether an error answers every call.
  bool IsBroken() const { return !broken_.ok(); }
  // The runs that other ranks have cancelled, and this one has not, since the last call. To be
  // asked for before the next is proposed.
  std::vector<CancelledRun> TakeCancelled() { return std::exchange(cancelled_elsewhere_, {}); }

  // This error answers every later call. All ranks must get it.
  void Break(const Status& reason);

  // Tells the others that this rank's script has ended and waits, without a timeout, until all
  // have left or the group is broken: the error says how, and is for ranks that stay.
  Status Leave();

 private:
  using Clock = std::chrono::steady_clock;

  // `different`: proposals have to be compared.
  Status CompareDigests(const Request& request, const InlineTensor* tensor, Action* action,
                        bool* different);
  // `request`: what the proposal is made of; null where this rank leaves.
  Status AgreeThroughCoordinator(const Proposal& proposal, const Request* request, Action* action);
  Status AgreeAsCoordinator(const Proposal& proposal, const Request* request, Action* action);
  Status AgreeAsParticipant(const Proposal& proposal, const Request* request, Action* action);
  // Rank 0's response to all proposals: what it sends, and then applies itself.
  std::string EncodeResponse(const Decision& decision,
                             const std::vector<Proposal>& proposals) const;
  Status SendToAll(const std::string& response);
  Status FailGroup(const Status& reason);
  // Does what a response says about this rank's own proposal; null: it has none.
  Status Apply(const std::string& response, const Proposal* proposal, Action* action);
  Proposal Propose(const Request& request) const;
  void SetCancelled(std::vector<CancelledRun> runs);
  // Of runs that were cancelled, by this rank or others.
  void HearOf(const std::vector<CancelledRun>& runs);

  Communicator* communicator_;
  RequestQueue* queue_;
  double timeout_s_;
  std::function<bool()> limited_;
  Status broken_;
  bool left_ = false;
  int64_t round_ = 0;  // responses of rank 0 so far
  std::vector<CancelledRun> cancelled_;  // here, of which the others may not know
  uint64_t cancelled_digest_ = 0;        // of them; 0: none
  std::vector<CancelledRun> cancelled_elsewhere_;
  bool joined_ = false;       // a kJoin has been proposed, and has not ended
  bool negotiating_ = false;  // rank 0 has chosen, and what it has chosen has not run yet
  bool reported_ = false;  // what this rank has pending while it lacks the choice
  std::vector<int64_t> proposed_;  // of each rank: how many proposals went to rank 0
  // When all ranks were last known to have arrived, or to be about to.
  Clock::time_point synced_at_;
  // While this rank lacks the choice: what that was then, and how long this has gone on.
  Clock::time_point missing_since_;
  StallClock missing_clock_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_AGREEMENT_H_
