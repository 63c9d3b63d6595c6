#include "runtime/agreement.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "core/log.h"
#include "core/pause.h"
#include "core/stall.h"
#include "runtime/description.h"

namespace ddl {
namespace {

// First byte of what rank 0 sends.
constexpr char kAgreed = 'A';    // then, if ranks have joined, how many have not, and a description
constexpr char kAllJoined = 'J'; // then the last one
constexpr char kFailed = 'F';    // then the Code, then the message
constexpr char kBroken = 'B';    // the same, and it is so for ever
constexpr char kStale = 'S';     // then 1 if settled, the generation, and the reason
constexpr char kChoice = 'C';    // the order differs; then what is next and what is pending behind it
constexpr char kRollCall = 'W';  // rank 0 is here and waits for others; answered with kHere

// First byte of what the others send, beside proposals.
constexpr char kHere = 'H';
constexpr char kWithdrawn = 'X';  // this rank gave up waiting for rank 0
constexpr char kInstead = 'I';    // rank 0's choice is not here yet; then what is
constexpr char kTakenBack = 'T';  // what this rank proposed; then the proposal's number

// What proposals that are no request have in the place of its digest.
constexpr uint64_t kJoinDigest = 1, kLeaveDigest = 2, kNoticeDigest = 3;

std::string Encode(const std::vector<Turn>& order) {
  std::string text(1, kChoice);
  for (const Turn& turn : order) {
    text += (turn.ordered ? 'O' : 'U') + turn.stream + "\n" + turn.title + "\n";
  }
  return text;
}

std::vector<Turn> Decode(const std::string& text) {
  std::vector<Turn> order;
  for (size_t at = 1; at < text.size();) {
    const size_t stream = text.find('\n', at), title = text.find('\n', stream + 1);
    order.push_back({text.substr(stream + 1, title - stream - 1), text[at] == 'O',
                     text.substr(at + 1, stream - at - 1)});
    at = title + 1;
  }
  return order;
}

// `AllReduce "a", AllReduce "b" and 5 more`
std::string List(const std::vector<Turn>& order) {
  constexpr size_t kNamed = 3;
  if (order.empty()) return "nothing";
  std::string text;
  for (size_t i = 0; i < std::min(kNamed, order.size()); ++i) {
    text += (i == 0 ? "" : ", ") + order[i].title;
  }
  if (order.size() > kNamed) text += " and " + std::to_string(order.size() - kNamed) + " more";
  return text;
}

// Whether a rank that waits with something else has to be told something at once.
bool HasNews(const std::vector<Proposal>& proposals, const std::vector<bool>& arrived) {
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (!arrived[rank]) continue;
    if (proposals[rank].kind == Proposal::Kind::kNotice) return true;
    if (proposals[rank].generation != proposals[0].generation) return true;
  }
  return false;
}

// Whether a rank waits that shall not wait for ever.
bool IsLimited(const std::vector<Proposal>& proposals, const std::vector<bool>& arrived) {
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (arrived[rank] && proposals[rank].kind != Proposal::Kind::kNotice) return true;
  }
  return false;
}

// Those that wait with something else propose it again afterwards.
std::vector<Proposal> WithoutMissing(std::vector<Proposal> proposals,
                                     const std::vector<bool>& arrived) {
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (!arrived[rank]) proposals[rank] = proposals[0];
  }
  return proposals;
}

}  // namespace

Agreement::Agreement(Communicator* communicator, Negotiator* negotiator, double timeout_s,
                     std::function<bool()> limited)
    : communicator_(communicator),
      negotiator_(negotiator),
      timeout_s_(timeout_s),
      limited_(std::move(limited)),
      proposed_(communicator->size(), 0) {}

Proposal Agreement::Propose(const Request& request) const {
  Proposal proposal;
  proposal.generation = generation_;
  proposal.reason = reason_;
  switch (request.kind) {
    case Request::Kind::kJoin:
      proposal.kind = Proposal::Kind::kJoin;
      proposal.joins_now = !joined_;
      return proposal;
    case Request::Kind::kNotice: proposal.kind = Proposal::Kind::kNotice; return proposal;
    default: break;
  }
  proposal.kind = request.ordered ? Proposal::Kind::kOrdered : Proposal::Kind::kUnordered;
  proposal.description = Describe(request);
  return proposal;
}

Status Agreement::Agree(const Request& request, const SmallTensor* tensor, Accord* accord) {
  *accord = Accord();
  DDL_RETURN_IF_ERROR(broken_);
  if (communicator_->size() == 1) {
    if (request.kind == Request::Kind::kJoin) accord->kind = Accord::Kind::kAllJoined;
    return Status();
  }
  bool different = true;
  if (!negotiating_) {
    DDL_RETURN_IF_ERROR(MeetOn(request, tensor, accord, &different));
  }
  if (different) {
    DDL_RETURN_IF_ERROR(AgreeOverRoot(Propose(request), &request, accord));
  }
  if (request.kind == Request::Kind::kJoin) joined_ = accord->kind != Accord::Kind::kAllJoined;
  return Status();
}

Status Agreement::MeetOn(const Request& request, const SmallTensor* tensor, Accord* accord,
                         bool* different) {
  Offer offer;
  if (request.kind == Request::Kind::kJoin || request.kind == Request::Kind::kNotice) {
    const bool joins = request.kind == Request::Kind::kJoin;
    offer.digest[0] = joins ? kJoinDigest : kNoticeDigest;
    offer.digest[1] = static_cast<uint64_t>(generation_) << 1 | joined_;
    offer.asks_nothing = !joins;
  } else {
    Digest(request, generation_, offer.digest);
  }
  offer.title = [&request] { return Title(request); };
  offer.withdrawn = request.withdrawn.get();
  offer.limited = limited_;
  if (tensor != nullptr) {
    offer.in = tensor->in;
    offer.out = tensor->out;
    offer.count = tensor->count;
    offer.dtype = tensor->dtype;
    offer.divisor = tensor->divisor;
  }
  Met met = Met::kAlike;
  broken_ = communicator_->Meet(offer, &met);
  DDL_RETURN_IF_ERROR(broken_);
  // All ranks are here. If they differ, their proposals tell in what.
  together_at_ = Clock::now();
  *different = met == Met::kDifferent;
  if (met == Met::kWithdrawn) {
    accord->kind = Accord::Kind::kAgain;
  } else if (met == Met::kAlike) {
    notice_ = false;
    if (request.kind == Request::Kind::kNotice) {
      accord->kind = Accord::Kind::kAgain;
    } else if (request.kind == Request::Kind::kJoin) {
      accord->kind = Accord::Kind::kAllJoined;
      accord->last_joined = communicator_->size() - 1;
    } else if (tensor != nullptr) {
      accord->kind = Accord::Kind::kSummed;
    }
  }
  return Status();
}

Status Agreement::Leave() {
  DDL_RETURN_IF_ERROR(broken_);
  if (communicator_->size() == 1) return Status();
  Proposal proposal;
  proposal.kind = Proposal::Kind::kLeave;
  Accord accord;
  if (negotiating_) return AgreeOverRoot(proposal, nullptr, &accord);
  Offer offer;
  offer.digest[0] = kLeaveDigest;
  offer.leaving = true;
  offer.title = [] { return std::string("Leave"); };
  Met met = Met::kAlike;
  broken_ = communicator_->Meet(offer, &met);
  return broken_;
}

Status Agreement::AgreeOverRoot(const Proposal& proposal, const Request* request,
                                Accord* accord) {
  const bool met = !negotiating_;
  const Status status = communicator_->rank() == 0 ? AgreeAsRoot(proposal, request, accord)
                                                   : AgreeAsMember(proposal, request, accord);
  told_ = false;
  if (status.ok() && met && accord->kind == Accord::Kind::kRun && accord->contributors == 0 &&
      proposal.asks()) {
    return Status(Code::kInternal, proposal.title() +
                                       ": digests differ where descriptions do not. Do all ranks "
                                       "run the same build of ddl?");
  }
  return status;
}

Status Agreement::AgreeAsRoot(const Proposal& proposal, const Request* request,
                              Accord* accord) {
  const int size = communicator_->size();
  std::vector<Proposal> proposals(size);
  std::vector<std::string> instead(size);
  std::vector<bool> arrived(size, false);
  bool taken_back = false;
  proposals[0] = proposal;
  arrived[0] = true;
  int count = 1;
  // The rank that left and one that waits for the others, or -1.
  int leaver = -1, worker = -1;
  (proposal.kind == Proposal::Kind::kLeave ? leaver : worker) = 0;

  // After a long absence of this rank a member may have given up, and its message saying so may
  // still be on the way: then each must answer a roll call before it counts as here. A shorter
  // absence is safe without, because members start to wait after the last verdict.
  const bool doubtful =
      Clock::now() - together_at_ > std::chrono::duration<double>(timeout_s_ / 2);
  std::vector<int> unanswered(size, 0);

  const Pauses wait;
  WarningSchedule warnings(timeout_s_);
  double worker_since_s = 0, next_roll_call_s = timeout_s_ / 4;
  while (true) {
    bool all_answered = true;
    for (int rank = 1; rank < size; ++rank) {
      std::string message;
      bool received = false;
      DDL_RETURN_IF_ERROR(communicator_->TryReceive(rank, &message, &received));
      if (!received) {
        all_answered = all_answered && unanswered[rank] == 0;
        continue;
      }
      all_answered = false;  // look once more
      const char kind = message[0];
      if (kind == kHere) {
        // Before its own request it answers a roll call of the one that gave way, and no other.
        if (arrived[rank]) --unanswered[rank];
        continue;
      }
      if (kind == kInstead) {
        instead[rank] = "; rank " + std::to_string(rank) + " waits with " + message.substr(1) +
                        " instead";
        continue;
      }
      if (kind == kTakenBack) {
        // Else it crossed the verdict.
        if (arrived[rank] && std::atoll(message.c_str() + 1) == proposed_[rank]) taken_back = true;
        continue;
      }
      if (kind == kWithdrawn) {
        return Fail(
            Status(Code::kDeadlineExceeded,
                   proposals[rank].title() + ": rank " + std::to_string(rank) +
                       " waited longer than " + Seconds(timeout_s_) +
                       " for rank 0 and gave up. Raise DDL_STALL_TIMEOUT if rank 0 needs so long."),
            true);
      }
      arrived[rank] = true;
      ++count;
      if (doubtful) {
        DDL_RETURN_IF_ERROR(communicator_->Send(rank, std::string(1, kRollCall)));
        ++unanswered[rank];
      }
      proposals[rank] = Proposal::Decode(message);
      ++proposed_[rank];
      if (proposals[rank].kind == Proposal::Kind::kLeave) {
        leaver = rank;
        continue;
      }
      if (worker < 0) {
        worker = rank;
        worker_since_s = wait.elapsed_s();
        next_roll_call_s = worker_since_s + timeout_s_ / 4;
      }
    }
    if (leaver >= 0 && worker >= 0) {
      return Fail(
          Status(Code::kFailedPrecondition,
                 proposals[worker].title() + ": rank " + std::to_string(leaver) +
                     " has already ended its script, but rank " + std::to_string(worker) +
                     " still runs this collective. Let all ranks do the same number "
                     "of steps, and look for an early exit on rank " +
                     std::to_string(leaver) + "."),
          true);
    }
    if (count == size && all_answered) break;
    const double elapsed_s = wait.elapsed_s();
    if (worker >= 0) {
      const double waited_s = elapsed_s - worker_since_s;
      std::string others;
      bool all_lack = true;
      for (int rank = 1; rank < size; ++rank) {
        if (arrived[rank]) continue;
        others += instead[rank];
        all_lack = all_lack && !instead[rank].empty();
      }
      if (count < size && all_lack && HasNews(proposals, arrived)) break;
      if (request != nullptr && request->gives_way && count < size && all_lack) {
        return Fail(Status(Code::kUnavailable, proposals[0].title() + ": " + Missing(arrived) +
                                                   " did not call it" + others + "."),
                    false);
      }
      if (waited_s > timeout_s_ && IsLimited(proposals, arrived)) {
        return Fail(Status(Code::kDeadlineExceeded,
                           proposals[worker].title() + ": " + Missing(arrived) +
                               " did not come within " + Seconds(timeout_s_) + others +
                               ". Look for what keeps it busy or blocked; raise "
                               "DDL_STALL_TIMEOUT if it needs so long."),
                    true);
      }
      if (warnings.Due(waited_s)) {
        LogLine(0, proposals[worker].title() + ": waiting for " + Missing(arrived) + " since " +
                       Seconds(waited_s) + " (limit " + Seconds(timeout_s_) + ")" + others);
      }
      if (elapsed_s > next_roll_call_s) {
        next_roll_call_s += timeout_s_ / 4;
        for (int rank = 1; rank < size; ++rank) {
          if (arrived[rank]) {
            DDL_RETURN_IF_ERROR(communicator_->Send(rank, std::string(1, kRollCall)));
            ++unanswered[rank];
          }
        }
      }
    }
    wait.Pause();
  }
  if (leaver >= 0) return SendToAll(std::string(1, kAgreed));
  Decision decision = Decide(WithoutMissing(proposals, arrived));
  decision.settled = decision.settled && count == size;
  if (decision.kind != Decision::Kind::kStale &&
      (taken_back || (request != nullptr && request->IsWithdrawn()))) {
    // Nobody is stale yet: whoever took it back says so in the next round.
    decision.kind = Decision::Kind::kStale;
    decision.settled = false;
  }
  const std::string verdict = Verdict(decision, proposals);
  DDL_RETURN_IF_ERROR(SendToAll(verdict));
  return Apply(verdict, &proposal, accord);
}

std::string Agreement::Verdict(const Decision& decision,
                               const std::vector<Proposal>& proposals) const {
  const int size = communicator_->size();
  switch (decision.kind) {
    case Decision::Kind::kAllJoined: return kAllJoined + std::to_string(decision.last_joined);
    case Decision::Kind::kStale:
      return std::string(1, kStale) + (decision.settled ? "1" : "0") +
             std::to_string(decision.generation) + "\n" + decision.reason;
    case Decision::Kind::kFail:
      return std::string(1, kFailed) + static_cast<char>(decision.status.code()) +
             decision.status.message();
    case Decision::Kind::kReorder: {
      const Proposal& first = proposals[decision.first];
      return Encode(decision.first == 0
                        ? negotiator_->Order()
                        : std::vector<Turn>{{first.title(), first.kind == Proposal::Kind::kOrdered,
                                             StreamOf(first.description)}});
    }
    case Decision::Kind::kRun: break;
  }
  if (decision.contributors == size) return std::string(1, kAgreed);
  return kAgreed + std::to_string(decision.contributors) + "\n" +
         proposals[decision.first].description;
}

Status Agreement::Fail(const Status& reason, bool breaks_group) {
  std::string verdict(1, breaks_group ? kBroken : kFailed);
  verdict += static_cast<char>(reason.code());
  verdict += reason.message();
  if (breaks_group) broken_ = reason;
  negotiating_ = false;
  DDL_RETURN_IF_ERROR(SendToAll(verdict));
  return reason;
}

void Agreement::Break(const Status& reason) {
  if (broken_.ok()) broken_ = reason;
}

void Agreement::Withdraw(const std::string& reason) {
  if (communicator_->size() == 1) return;
  ++generation_;
  reason_ = reason;
  notice_ = true;
}

Status Agreement::SendToAll(const std::string& verdict) {
  // Also to ranks that are still missing: they find the verdict when they come.
  for (int rank = 1; rank < communicator_->size(); ++rank) {
    DDL_RETURN_IF_ERROR(communicator_->Send(rank, verdict));
  }
  together_at_ = Clock::now();
  return Status();
}

Status Agreement::AgreeAsMember(const Proposal& proposal, const Request* request,
                                Accord* accord) {
  DDL_RETURN_IF_ERROR(communicator_->Send(0, proposal.Encode()));
  const int64_t number = ++proposed_[communicator_->rank()];
  bool taken_back = false;
  const Pauses wait;
  WarningSchedule warnings(timeout_s_);
  const bool limited = proposal.asks() || proposal.kind == Proposal::Kind::kJoin;
  double heard_s = 0;  // when rank 0 was last known to be here
  int late_polls = 0;
  while (true) {
    std::string message;
    bool received = false;
    DDL_RETURN_IF_ERROR(communicator_->TryReceive(0, &message, &received));
    if (received && message[0] != kRollCall) return Apply(message, &proposal, accord);
    if (!taken_back && request != nullptr && request->IsWithdrawn()) {
      taken_back = true;
      DDL_RETURN_IF_ERROR(communicator_->Send(0, kTakenBack + std::to_string(number)));
    }
    const double elapsed_s = wait.elapsed_s();
    if (received) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, std::string(1, kHere)));
      heard_s = elapsed_s;
      late_polls = 0;
    }
    // After this message nothing that rank 0 says is heard.
    if (limited && elapsed_s - heard_s > timeout_s_ && ++late_polls > kLatePolls) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, std::string(1, kWithdrawn)));
      broken_ = Status(Code::kDeadlineExceeded,
                       proposal.title() + ": rank 0 did not come within " + Seconds(timeout_s_) +
                           ". Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT if "
                           "it needs so long.");
      return broken_;
    }
    if (limited && heard_s == 0 && warnings.Due(elapsed_s)) {
      LogLine(communicator_->rank(), proposal.title() + ": waiting for rank 0 since " +
                                         Seconds(elapsed_s) + " (limit " + Seconds(timeout_s_) +
                                         ")");
    }
    wait.Pause();
  }
}

Status Agreement::Apply(const std::string& verdict, const Proposal* proposal, Accord* accord) {
  together_at_ = Clock::now();
  // All ranks that hear this do the same next: propose over rank 0 again, or meet.
  negotiating_ = verdict[0] == kChoice;
  *accord = Accord();
  switch (verdict[0]) {
    case kAgreed:
      notice_ = false;
      if (verdict.size() == 1) return Status();
      accord->contributors = std::atoi(verdict.c_str() + 1);
      accord->description = verdict.substr(verdict.find('\n') + 1);
      return Status();
    case kAllJoined:
      accord->kind = Accord::Kind::kAllJoined;
      accord->last_joined = std::atoi(verdict.c_str() + 1);
      return Status();
    case kChoice:
      accord->kind = Accord::Kind::kAgain;
      // Whoever has joined runs what comes.
      if (proposal == nullptr || proposal->asks()) negotiator_->Follow(Decode(verdict));
      return Status();
    case kStale: {
      const int64_t newest = std::atoll(verdict.c_str() + 2);
      accord->kind = Accord::Kind::kAgain;
      negotiator_->Follow({});
      if (verdict[1] == '1') notice_ = false;
      if (proposal == nullptr || proposal->generation == newest) return Status();
      if (!proposal->asks()) {
        generation_ = newest;
        return Status();
      }
      ++generation_;
      reason_ = verdict.substr(verdict.find('\n') + 1);
      return Status(Code::kFailedPrecondition, proposal->title() + ": " + reason_);
    }
    default: break;
  }
  const Status reason(static_cast<Code>(verdict[1]), verdict.substr(2));
  if (verdict[0] == kBroken) broken_ = reason;
  return reason;
}

Status Agreement::Lack() {
  DDL_RETURN_IF_ERROR(broken_);
  const double waited_s = std::chrono::duration<double>(Clock::now() - together_at_).count();
  if (!told_ && waited_s > std::min(5.0, timeout_s_ / 4)) {
    told_ = true;
    DDL_RETURN_IF_ERROR(communicator_->Send(0, kInstead + List(negotiator_->Order())));
  }
  std::string verdict;
  bool received = false;
  DDL_RETURN_IF_ERROR(communicator_->TryReceive(0, &verdict, &received));
  if (received) {
    told_ = false;
    const std::string chosen = negotiator_->choice().title;
    Accord accord;
    DDL_RETURN_IF_ERROR(Apply(verdict, nullptr, &accord));
    return Status(Code::kUnavailable, chosen + ": its run was given up.");
  }
  if (waited_s > 2 * timeout_s_) {  // rank 0 would have spoken long ago
    broken_ = Status(Code::kDeadlineExceeded,
                     negotiator_->choice().title + ": rank 0 chose it and was not heard of within " +
                         Seconds(2 * timeout_s_) + ". See its log for the reason.");
  }
  return broken_;
}

}  // namespace ddl
