#ifndef DDL_RUNTIME_PROPOSAL_H_
#define DDL_RUNTIME_PROPOSAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/cancelled_run.h"

namespace ddl {

// What a rank would do next, in the form in which it is sent.
struct Proposal {
  enum class Kind : char {
    kOrdered = 'O',    // the described collective; its stream keeps the order
    kUnordered = 'U',  // the same; ranks know it by its title
    kJoin = 'J',       // nothing of its own: zeros for what the others reduce
    kCancelNotice = 'N',  // nothing: it has cancelled a run
    kLeave = 'L',      // nothing more, ever
  };

  Kind kind = Kind::kOrdered;
  bool newly_joined = false;  // a kJoin that is proposed for the first time
  // How many responses of rank 0 this rank has had, so that rank 0 can discard a proposal that
  // crossed one on the way.
  int64_t round = 0;
  std::vector<CancelledRun> cancelled;  // here, of which the others may not know
  std::string description;              // of kOrdered and kUnordered

  bool has_request() const { return kind == Kind::kOrdered || kind == Kind::kUnordered; }
  std::string title() const;
  std::string Encode() const;
  static Proposal Decode(const std::string& message);
};

// What follows from the proposals of all ranks: the same on every rank.
struct Decision {
  enum class Kind {
    kRun,      // the one collective that is proposed, `contributors` ranks bringing tensors
    kReorder,  // another order: that of rank 0, or of the first rank that has not joined
    kFail,     // what is proposed fails everywhere, with `status`
    kCancelled,  // some have cancelled runs: each rank fails those, and proposes again
    kAllJoined,
  };

  Kind kind = Kind::kRun;
  Status status;
  int first = 0;  // the first rank that asks for a collective
  int contributors = 0;
  int last_joined = 0;
  std::vector<CancelledRun> cancelled;
};

// `proposals`: one for each rank, none of them kLeave. Pure.
//
// Requests match if they describe one collective. Two ordered ones of one stream that do not, or
// two of one title, are an error. Any others differ in order alone.
Decision Decide(const std::vector<Proposal>& proposals);

}  // namespace ddl

#endif  // DDL_RUNTIME_PROPOSAL_H_
