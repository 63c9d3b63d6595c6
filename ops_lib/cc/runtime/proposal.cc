#include "runtime/proposal.h"

#include <algorithm>
#include <cstring>

#include "runtime/description.h"

namespace ddl {
namespace {

constexpr char kOnGpu[] = "] on a GPU";

// Whether the order alone keeps two requests apart.
bool DifferInOrder(const Proposal& one, const Proposal& other) {
  if (StreamOf(one.description) != StreamOf(other.description)) return true;
  const bool ordered =
      one.kind == Proposal::Kind::kOrdered && other.kind == Proposal::Kind::kOrdered;
  return !ordered && Title(one.description) != Title(other.description);
}

// The first that has joined: "rank 2".
std::string JoinedRank(const std::vector<Proposal>& proposals) {
  const auto joined = std::find_if(proposals.begin(), proposals.end(), [](const Proposal& one) {
    return one.kind == Proposal::Kind::kJoin;
  });
  return "rank " + std::to_string(joined - proposals.begin());
}

// What joined ranks cannot take part in.
Status CheckJoined(const std::vector<Proposal>& proposals, const std::string& description) {
  if (description.find(kOnGpu) != std::string::npos) {
    return Status(Code::kFailedPrecondition,
                  Title(description) + ": a rank that has joined has no tensors on a GPU to add. "
                                       "Set DDL_GPU=host where ranks join.");
  }
  Request request;
  DDL_RETURN_IF_ERROR(Parse(description, &request));
  if (request.kind == Request::Kind::kBroadcast &&
      proposals[request.root].kind == Proposal::Kind::kJoin) {
    return Status(Code::kInvalidArgument,
                  Title(description) + ": rank " + std::to_string(request.root) +
                      ", whose values are to be broadcast, has joined. Broadcast after all ranks "
                      "have joined, from the rank that join() returns.");
  }
  if (request.kind == Request::Kind::kAllToAll) {
    return Status(Code::kInvalidArgument,
                  Title(description) + ": " + JoinedRank(proposals) +
                      " has joined, and has no rows for the others. Exchange rows before the first "
                      "rank joins, or after all have.");
  }
  return Status();
}

}  // namespace

std::string Proposal::title() const {
  switch (kind) {
    case Kind::kJoin: return "Join";
    case Kind::kLeave: return "Leave";
    case Kind::kCancelNotice: return "Notice";
    default: return Title(description);
  }
}

std::string Proposal::Encode() const {
  return std::string(1, static_cast<char>(kind)) + (newly_joined ? "1" : "0") +
         std::to_string(round) + "\n" + ddl::Encode(cancelled) + description;
}

Proposal Proposal::Decode(const std::string& message) {
  Proposal proposal;
  proposal.kind = static_cast<Kind>(message[0]);
  proposal.newly_joined = message[1] == '1';
  proposal.round = std::atoll(message.c_str() + 2);
  size_t at = message.find('\n') + 1;
  proposal.cancelled = DecodeCancelledRuns(message, &at);
  proposal.description = message.substr(at);
  return proposal;
}

Decision Decide(const std::vector<Proposal>& proposals) {
  Decision decision;
  const std::string cancelled = Identity(proposals[0].cancelled);
  bool all_know = true;
  for (const Proposal& one : proposals) {
    if (one.kind == Proposal::Kind::kCancelNotice || Identity(one.cancelled) != cancelled) {
      all_know = false;
    }
  }
  if (!all_know) {
    decision.kind = Decision::Kind::kCancelled;
    for (const Proposal& one : proposals) {
      for (const CancelledRun& run : one.cancelled) Merge(run, &decision.cancelled);
    }
    return decision;
  }

  decision.first = -1;
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (proposals[rank].has_request()) {
      if (decision.first < 0) decision.first = static_cast<int>(rank);
      ++decision.contributors;
    } else if (proposals[rank].newly_joined) {
      decision.last_joined = static_cast<int>(rank);
    }
  }
  if (decision.first < 0) {
    decision.kind = Decision::Kind::kAllJoined;
    return decision;
  }
  const Proposal& reference = proposals[decision.first];
  for (size_t rank = decision.first + 1; rank < proposals.size(); ++rank) {
    const Proposal& one = proposals[rank];
    if (!one.has_request() || Compatible(one.description, reference.description)) continue;
    if (DifferInOrder(one, reference)) {
      decision.kind = Decision::Kind::kReorder;
      return decision;
    }
    if (decision.kind == Decision::Kind::kFail) continue;
    decision.kind = Decision::Kind::kFail;
    decision.status = MismatchError(static_cast<int>(rank), one.description, decision.first,
                                    reference.description);
  }
  if (decision.kind == Decision::Kind::kFail) return decision;
  if (decision.contributors < static_cast<int>(proposals.size())) {
    decision.status = CheckJoined(proposals, reference.description);
    if (!decision.status.ok()) decision.kind = Decision::Kind::kFail;
  }
  return decision;
}

}  // namespace ddl
