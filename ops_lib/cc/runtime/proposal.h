#ifndef DDL_RUNTIME_PROPOSAL_H_
#define DDL_RUNTIME_PROPOSAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace ddl {

// What a rank would do next, in the form in which it is sent.
struct Proposal {
  enum class Kind : char {
    kOrdered = 'O',    // the described collective; its stream keeps the order
    kUnordered = 'U',  // the same; ranks know it by its title
    kJoin = 'J',       // nothing of its own: zeros for what the others reduce
    kCancelNotice = 'N',  // nothing: its generation is a new one
    kLeave = 'L',      // nothing more, ever
  };

  Kind kind = Kind::kOrdered;
  bool newly_joined = false;  // a kJoin that is proposed for the first time
  // How many runs this rank has cancelled that the others may not know of; see runtime/agreement.h.
  int64_t generation = 0;
  std::string reason;       // for the last of them
  std::string description;  // of kOrdered and kUnordered

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
    kStale,    // what ranks of an older generation than `generation` propose fails for `reason`;
               // the others propose again
    kAllJoined,
  };

  Kind kind = Kind::kRun;
  Status status;
  int first = 0;  // the first rank that asks for a collective
  int contributors = 0;
  int last_joined = 0;
  int64_t generation = 0;
  bool converged = false;  // all ranks will be of that generation
  std::string reason;
};

// `proposals`: one for each rank, none of them kLeave. Pure.
//
// Requests match if they describe one collective. Two ordered ones of one stream that do not, or
// two of one title, are an error. Any others differ in order alone.
Decision Decide(const std::vector<Proposal>& proposals);

}  // namespace ddl

#endif  // DDL_RUNTIME_PROPOSAL_H_
