#include "runtime/agreement.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <utility>

#include "core/log.h"
#include "core/backoff.h"
#include "runtime/description.h"

namespace ddl {
namespace {

// First byte of a response, or of what else rank 0 sends.
constexpr char kAgreed = 'A';    // then, if ranks have joined, how many have not, and a description
constexpr char kAllJoined = 'J';  // then the last one
constexpr char kFailed = 'F';    // then the Code, then the message
constexpr char kBroken = 'B';  // the same, and the group is broken
constexpr char kDropped = 'D';  // then the title of what rank 0 has dropped, then the message
constexpr char kRunsCancelled = 'S';  // then the runs
constexpr char kChoice = 'C';    // the order differs; then what is next and what is pending behind it
constexpr char kPing = 'W';  // rank 0 is alive and waits for others; answered with kPong

// First byte of what the others send, beside proposals.
constexpr char kPong = 'H';
constexpr char kTimedOut = 'X';  // this rank gave up waiting for rank 0
constexpr char kPending = 'I';  // rank 0's choice has not been submitted here; then the round, and
                                // what has
constexpr char kCancelled = 'T';  // what this rank proposed; then the proposal's number

// What proposals that are no request have in the place of its digest.
constexpr uint64_t kJoinDigest = 1, kLeaveDigest = 2, kNoticeDigest = 3;

std::string Encode(const std::vector<RequestId>& order) {
  std::string text(1, kChoice);
  for (const RequestId& id : order) {
    text += (id.ordered ? 'O' : 'U') + id.stream + "\n" + id.title + "\n";
  }
  return text;
}

std::vector<RequestId> Decode(const std::string& text) {
  std::vector<RequestId> order;
  for (size_t at = 1; at < text.size();) {
    const size_t stream = text.find('\n', at), title = text.find('\n', stream + 1);
    order.push_back({text.substr(stream + 1, title - stream - 1), text[at] == 'O',
                     text.substr(at + 1, stream - at - 1)});
    at = title + 1;
  }
  return order;
}

// `AllReduce "a", AllReduce "b" and 5 more`
std::string List(const std::vector<RequestId>& order) {
  constexpr size_t kNamed = 3;
  if (order.empty()) return "nothing";
  std::string text;
  for (size_t i = 0; i < std::min(kNamed, order.size()); ++i) {
    text += (i == 0 ? "" : ", ") + order[i].title;
  }
  if (order.size() > kNamed) text += " and " + std::to_string(order.size() - kNamed) + " more";
  return text;
}

// Whether a rank that lacks the choice has to be told of a cancelled run at once.
bool AnyRunCancelled(const std::vector<Proposal>& proposals, const std::vector<bool>& arrived) {
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (!arrived[rank]) continue;
    if (proposals[rank].kind == Proposal::Kind::kCancelNotice) return true;
    if (!proposals[rank].cancelled.empty()) return true;
  }
  return false;
}

// Whether the timeout applies to a rank that has arrived.
bool TimeoutApplies(const std::vector<Proposal>& proposals, const std::vector<bool>& arrived) {
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (arrived[rank] && proposals[rank].kind != Proposal::Kind::kCancelNotice) return true;
  }
  return false;
}

// Ranks that lack the choice propose what they have afterwards.
std::vector<Proposal> FillMissing(std::vector<Proposal> proposals,
                                  const std::vector<bool>& arrived) {
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    if (arrived[rank]) continue;
    proposals[rank] = proposals[0];
    proposals[rank].cancelled.clear();
  }
  return proposals;
}

}  // namespace

Agreement::Agreement(Communicator* communicator, RequestQueue* queue, double timeout_s,
                     std::function<bool()> limited)
    : communicator_(communicator),
      queue_(queue),
      timeout_s_(timeout_s),
      limited_(std::move(limited)),
      proposed_(communicator->size(), 0) {}

Proposal Agreement::Propose(const Request& request) const {
  Proposal proposal;
  proposal.round = round_;
  proposal.cancelled = cancelled_;
  switch (request.kind) {
    case Request::Kind::kJoin:
      proposal.kind = Proposal::Kind::kJoin;
      proposal.newly_joined = !joined_;
      return proposal;
    case Request::Kind::kCancelNotice:
      proposal.kind = Proposal::Kind::kCancelNotice;
      return proposal;
    default: break;
  }
  proposal.kind = request.ordered ? Proposal::Kind::kOrdered : Proposal::Kind::kUnordered;
  proposal.description = Describe(request);
  return proposal;
}

Status Agreement::Agree(const Request& request, const InlineTensor* tensor, Action* action) {
  *action = Action();
  DDL_RETURN_IF_ERROR(broken_);
  if (communicator_->size() == 1) {
    if (request.kind == Request::Kind::kJoin) action->kind = Action::Kind::kAllJoined;
    return Status();
  }
  Status status;
  bool different = true;
  if (!negotiating_) status = CompareDigests(request, tensor, action, &different);
  if (status.ok() && different) {
    status = AgreeThroughCoordinator(Propose(request), &request, action);
  }
  if (request.kind == Request::Kind::kJoin) {
    if (!status.ok()) {
      joined_ = false;  // it has ended with the error: the next one is new
    } else if (action->kind != Action::Kind::kRetry) {
      joined_ = action->kind != Action::Kind::kAllJoined;
    }  // else all have to propose again, and it is as new as it was
  }
  return status;
}

Status Agreement::CompareDigests(const Request& request, const InlineTensor* tensor, Action* action,
                                 bool* different) {
  Arrival arrival;
  if (request.kind == Request::Kind::kJoin || request.kind == Request::Kind::kCancelNotice) {
    const bool joins = request.kind == Request::Kind::kJoin;
    arrival.digest[0] = joins ? kJoinDigest : kNoticeDigest;
    arrival.digest[1] = cancelled_digest_ << 1 | joined_;
    arrival.without_request = !joins;
  } else {
    Digest(request, cancelled_digest_, arrival.digest);
  }
  arrival.title = [&request] { return Title(request); };
  arrival.cancelled = request.cancelled.get();
  arrival.limited = limited_;
  if (tensor != nullptr) {
    arrival.in = tensor->in;
    arrival.out = tensor->out;
    arrival.count = tensor->count;
    arrival.dtype = tensor->dtype;
    arrival.reduction = tensor->reduction;
  }
  BarrierResult result = BarrierResult::kMatch;
  broken_ = communicator_->Barrier(arrival, &result);
  DDL_RETURN_IF_ERROR(broken_);
  // All ranks have arrived. If the digests differ, their proposals tell in what.
  synced_at_ = Clock::now();
  *different = result == BarrierResult::kMismatch;
  if (result == BarrierResult::kCancelled) {
    action->kind = Action::Kind::kRetry;
  } else if (result == BarrierResult::kMatch) {
    SetCancelled({});  // all have cancelled the same
    if (request.kind == Request::Kind::kCancelNotice) {
      action->kind = Action::Kind::kRetry;
    } else if (request.kind == Request::Kind::kJoin) {
      action->kind = Action::Kind::kAllJoined;
      action->last_joined = communicator_->size() - 1;
    } else if (tensor != nullptr) {
      action->kind = Action::Kind::kReduced;
    }
  }
  return Status();
}

Status Agreement::Leave() {
  DDL_RETURN_IF_ERROR(broken_);
  if (communicator_->size() == 1 || left_) return Status();
  left_ = true;
  if (negotiating_) {
    Proposal proposal;
    proposal.kind = Proposal::Kind::kLeave;
    proposal.round = round_;
    Action action;
    const Status status = AgreeThroughCoordinator(proposal, nullptr, &action);
    DDL_RETURN_IF_ERROR(broken_);
    if (status.ok() && action.kind == Action::Kind::kRun) return status;
  }
  Arrival arrival;
  arrival.digest[0] = kLeaveDigest;
  arrival.leaving = true;
  arrival.title = [] { return std::string("Leave"); };
  BarrierResult result = BarrierResult::kMatch;
  broken_ = communicator_->Barrier(arrival, &result);
  return broken_;
}

Status Agreement::AgreeThroughCoordinator(const Proposal& proposal, const Request* request,
                                          Action* action) {
  const bool met = !negotiating_;
  const Status status = communicator_->rank() == 0 ? AgreeAsCoordinator(proposal, request, action)
                                                   : AgreeAsParticipant(proposal, request, action);
  reported_ = false;
  // Rates may differ in their last bits.
  if (status.ok() && met && action->kind == Action::Kind::kRun && action->contributors == 0 &&
      proposal.has_request() && !request->rate.has_value()) {
    return Status(Code::kInternal, proposal.title() +
                                       ": digests differ where descriptions do not. Do all ranks "
                                       "run the same build of ddl?");
  }
  return status;
}

Status Agreement::AgreeAsCoordinator(const Proposal& proposal, const Request* request,
                                     Action* action) {
  const int size = communicator_->size();
  std::vector<Proposal> proposals(size);
  std::vector<std::string> pending(size);
  std::vector<bool> arrived(size, false);
  bool cancelled = false;
  proposals[0] = proposal;
  arrived[0] = true;
  int count = 1;
  // A rank that leaves and one that waits for the others, or -1.
  int leaver = -1, active = -1;
  (proposal.kind == Proposal::Kind::kLeave ? leaver : active) = 0;

  // After a long absence of this rank another one may have timed out, and its message saying so may
  // still be on the way: then each must answer a ping before it counts as arrived. A shorter
  // absence is safe without, because the others start to wait after the last response.
  const bool verify_liveness =
      Clock::now() - synced_at_ > std::chrono::duration<double>(timeout_s_ / 2);
  std::vector<int> unanswered(size, 0);

  const Backoff backoff;
  StallClock clock;
  WarningSchedule warnings(timeout_s_);
  double active_since_s = 0, next_ping_s = timeout_s_ / 4;
  int grace_polls = 0;
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
      if (kind == kPong) {
        // Before its own request it answers a ping for one that was dropped, and no other.
        if (arrived[rank]) --unanswered[rank];
        continue;
      }
      if (kind == kPending) {
        if (std::atoll(message.c_str() + 1) == round_) {
          pending[rank] = "; rank " + std::to_string(rank) + " waits for " +
                          message.substr(message.find('\n') + 1) + " instead";
        }
        continue;
      }
      if (kind == kCancelled) {
        // Else it crossed the response on the way.
        if (arrived[rank] && std::atoll(message.c_str() + 1) == proposed_[rank]) cancelled = true;
        continue;
      }
      if (kind == kTimedOut) {
        return FailGroup(
            Status(Code::kDeadlineExceeded,
                   proposals[rank].title() + ": rank " + std::to_string(rank) +
                       " waited longer than " + Seconds(timeout_s_) +
                       " for rank 0 and gave up. Raise DDL_STALL_TIMEOUT if rank 0 needs so "
                       "long."));
      }
      ++proposed_[rank];
      Proposal theirs = Proposal::Decode(message);
      // It crossed the last response, which came without it: that rank will propose again.
      if (theirs.round != round_) continue;
      proposals[rank] = std::move(theirs);
      arrived[rank] = true;
      ++count;
      if (verify_liveness) {
        DDL_RETURN_IF_ERROR(communicator_->Send(rank, std::string(1, kPing)));
        ++unanswered[rank];
      }
      if (proposals[rank].kind == Proposal::Kind::kLeave) {
        leaver = rank;
        continue;
      }
      if (active < 0) {
        active = rank;
        active_since_s = clock.Poll();
        next_ping_s = active_since_s + timeout_s_ / 4;
      }
    }
    if (leaver >= 0 && active >= 0) {
      return FailGroup(
          Status(Code::kFailedPrecondition,
                 proposals[active].title() + ": rank " + std::to_string(leaver) +
                     " has already ended its script, but rank " + std::to_string(active) +
                     " still runs this collective. Let all ranks do the same number of steps, and "
                     "look for an early exit on rank " +
                     std::to_string(leaver) + "."));
    }
    if (count == size && all_answered) break;
    const double elapsed_s = clock.Poll();
    if (active >= 0) {
      const double waited_s = elapsed_s - active_since_s;
      std::string others;
      bool all_pending = true;
      for (int rank = 1; rank < size; ++rank) {
        if (arrived[rank]) continue;
        others += pending[rank];
        all_pending = all_pending && !pending[rank].empty();
      }
      if (count < size && all_pending && AnyRunCancelled(proposals, arrived)) break;
      if (request != nullptr && request->optional && count < size && all_pending) {
        const Status dropped(Code::kUnavailable, proposals[0].title() + ": " + Missing(arrived) +
                                                     " did not call it" + others + ".");
        negotiating_ = false;
        DDL_RETURN_IF_ERROR(
            SendToAll(kDropped + proposals[0].title() + "\n" + dropped.message()));
        return dropped;
      }
      if (waited_s > timeout_s_ && TimeoutApplies(proposals, arrived) &&
          ++grace_polls > kGracePolls) {
        return FailGroup(
            Status(Code::kDeadlineExceeded,
                   proposals[active].title() + ": " + Missing(arrived) + " did not come within " +
                       Seconds(timeout_s_) + others +
                       ". Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT if it "
                       "needs so long."));
      }
      if (warnings.Due(waited_s)) {
        LogLine(0, proposals[active].title() + ": waited " + Seconds(waited_s) + " for " +
                       Missing(arrived) + " so far (limit " + Seconds(timeout_s_) + ")" + others);
      }
      if (elapsed_s > next_ping_s) {
        next_ping_s += timeout_s_ / 4;
        for (int rank = 1; rank < size; ++rank) {
          if (arrived[rank]) {
            DDL_RETURN_IF_ERROR(communicator_->Send(rank, std::string(1, kPing)));
            ++unanswered[rank];
          }
        }
      }
    }
    backoff.Pause();
  }
  if (leaver >= 0) return SendToAll(std::string(1, kAgreed));
  Decision decision = Decide(FillMissing(proposals, arrived));
  if (cancelled || (request != nullptr && request->IsCancelled())) {
    // Whoever cancelled says so in the next round.
    decision.kind = Decision::Kind::kCancelled;
  }
  const std::string response = EncodeResponse(decision, proposals);
  DDL_RETURN_IF_ERROR(SendToAll(response));
  // Else a long response could wait for this rank, which may look after messages no more. A rank
  // that has not arrived takes it later.
  if (count == size) broken_ = communicator_->Flush();
  if (!broken_.ok()) {
    communicator_->Break(broken_);
    return broken_;
  }
  return Apply(response, &proposal, action);
}

std::string Agreement::EncodeResponse(const Decision& decision,
                                      const std::vector<Proposal>& proposals) const {
  const int size = communicator_->size();
  switch (decision.kind) {
    case Decision::Kind::kAllJoined: return kAllJoined + std::to_string(decision.last_joined);
    case Decision::Kind::kCancelled: return kRunsCancelled + ddl::Encode(decision.cancelled);
    case Decision::Kind::kFail:
      return std::string(1, kFailed) + static_cast<char>(decision.status.code()) +
             decision.status.message();
    case Decision::Kind::kReorder: {
      const Proposal& first = proposals[decision.first];
      return Encode(
          decision.first == 0
              ? queue_->Order()
              : std::vector<RequestId>{{first.title(), first.kind == Proposal::Kind::kOrdered,
                                        StreamOf(first.description)}});
    }
    case Decision::Kind::kRun: break;
  }
  if (decision.contributors == size) return std::string(1, kAgreed);
  return kAgreed + std::to_string(decision.contributors) + "\n" +
         proposals[decision.first].description;
}

Status Agreement::FailGroup(const Status& reason) {
  broken_ = reason;
  negotiating_ = false;
  DDL_RETURN_IF_ERROR(
      SendToAll(std::string(1, kBroken) + static_cast<char>(reason.code()) + reason.message()));
  return reason;
}

void Agreement::Break(const Status& reason) {
  if (broken_.ok()) broken_ = reason;
}

void Agreement::CancelRun(CancelledRun run) {
  if (communicator_->size() == 1) return;
  run.ranks = {communicator_->rank()};
  std::vector<CancelledRun> all = std::move(cancelled_);
  all.push_back(std::move(run));
  SetCancelled(std::move(all));
}

void Agreement::SetCancelled(std::vector<CancelledRun> runs) {
  cancelled_ = std::move(runs);
  cancelled_digest_ =
      cancelled_.empty() ? 0 : std::hash<std::string>()(Identity(cancelled_)) | 1;
}

void Agreement::HearOf(const std::vector<CancelledRun>& runs) {
  const int rank = communicator_->rank();
  std::vector<CancelledRun> untold;
  // Rank 0 has all that this rank had cancelled, or, where it did not wait for this rank, nothing.
  const bool told = std::any_of(runs.begin(), runs.end(), [rank](const CancelledRun& run) {
    return std::count(run.ranks.begin(), run.ranks.end(), rank) > 0;
  });
  if (!told) untold = std::move(cancelled_);
  for (const CancelledRun& run : runs) {
    if (std::count(run.ranks.begin(), run.ranks.end(), rank) > 0) continue;
    if (const auto ours = FindSame(&untold, run); ours != untold.end()) {
      untold.erase(ours);
    } else {
      cancelled_elsewhere_.push_back(run);
    }
  }
  SetCancelled(std::move(untold));
}

Status Agreement::SendToAll(const std::string& response) {
  // Also to ranks that are still missing: they find the response when they arrive.
  for (int rank = 1; rank < communicator_->size(); ++rank) {
    DDL_RETURN_IF_ERROR(communicator_->Send(rank, response));
  }
  synced_at_ = Clock::now();
  ++round_;
  return Status();
}

Status Agreement::AgreeAsParticipant(const Proposal& proposal, const Request* request,
                                     Action* action) {
  DDL_RETURN_IF_ERROR(communicator_->Send(0, proposal.Encode()));
  const int64_t number = ++proposed_[communicator_->rank()];
  bool cancelled = false;
  const Backoff backoff;
  StallClock clock;
  WarningSchedule warnings(timeout_s_);
  const bool has_timeout = proposal.has_request() || proposal.kind == Proposal::Kind::kJoin;
  double answered_s = 0;  // when rank 0 was last known to be alive
  int grace_polls = 0;
  while (true) {
    std::string message;
    bool received = false;
    DDL_RETURN_IF_ERROR(communicator_->TryReceive(0, &message, &received));
    if (received && message[0] != kPing) return Apply(message, &proposal, action);
    if (!cancelled && request != nullptr && request->IsCancelled()) {
      cancelled = true;
      DDL_RETURN_IF_ERROR(communicator_->Send(0, kCancelled + std::to_string(number)));
    }
    const double elapsed_s = clock.Poll();
    if (received) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, std::string(1, kPong)));
      answered_s = elapsed_s;
      grace_polls = 0;
    }
    // After this message nothing that rank 0 sends is read.
    if (has_timeout && elapsed_s - answered_s > timeout_s_ && ++grace_polls > kGracePolls) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, std::string(1, kTimedOut)));
      broken_ = Status(Code::kDeadlineExceeded,
                       proposal.title() + ": rank 0 did not come within " + Seconds(timeout_s_) +
                           ". Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT if "
                           "it needs so long.");
      return broken_;
    }
    if (has_timeout && answered_s == 0 && warnings.Due(elapsed_s)) {
      LogLine(communicator_->rank(), proposal.title() + ": waited " + Seconds(elapsed_s) +
                                         " for rank 0 so far (limit " + Seconds(timeout_s_) + ")");
    }
    backoff.Pause();
  }
}

Status Agreement::Apply(const std::string& response, const Proposal* proposal, Action* action) {
  synced_at_ = Clock::now();
  if (communicator_->rank() != 0) ++round_;  // rank 0 counts what it sends
  // All ranks that get this do the same next: propose over rank 0 again, or enter a barrier.
  negotiating_ = response[0] == kChoice;
  *action = Action();
  switch (response[0]) {
    case kAgreed:
      SetCancelled({});  // all have cancelled the same
      if (response.size() == 1) return Status();
      action->contributors = std::atoi(response.c_str() + 1);
      action->description = response.substr(response.find('\n') + 1);
      return Status();
    case kAllJoined:
      action->kind = Action::Kind::kAllJoined;
      action->last_joined = std::atoi(response.c_str() + 1);
      return Status();
    case kChoice:
      action->kind = Action::Kind::kRetry;
      // A rank that has joined takes part in whatever is next.
      if (proposal == nullptr || proposal->has_request()) queue_->Follow(Decode(response));
      return Status();
    case kRunsCancelled: {
      size_t at = 1;
      action->kind = Action::Kind::kRetry;
      queue_->Follow({});
      HearOf(DecodeCancelledRuns(response, &at));
      return Status();
    }
    case kDropped: {
      const size_t line = response.find('\n');
      if (proposal != nullptr && proposal->title() != response.substr(1, line - 1)) {
        action->kind = Action::Kind::kRetry;
        queue_->Follow({});
        return Status();
      }
      return Status(Code::kUnavailable, response.substr(line + 1));
    }
    default: break;
  }
  const Status reason(static_cast<Code>(response[1]), response.substr(2));
  if (response[0] == kBroken) broken_ = reason;
  return reason;
}

Status Agreement::PollWhileMissing() {
  DDL_RETURN_IF_ERROR(broken_);
  if (missing_since_ != synced_at_) {
    missing_since_ = synced_at_;
    missing_clock_.Restart();
  }
  const double waited_s = missing_clock_.Poll();
  if (!reported_ && waited_s > std::min(5.0, timeout_s_ / 4)) {
    reported_ = true;
    DDL_RETURN_IF_ERROR(communicator_->Send(
        0, kPending + std::to_string(round_) + "\n" + List(queue_->Order())));
  }
  std::string response;
  bool received = false;
  DDL_RETURN_IF_ERROR(communicator_->TryReceive(0, &response, &received));
  if (received) {
    reported_ = false;
    const std::string chosen = queue_->choice().title;
    Action action;
    DDL_RETURN_IF_ERROR(Apply(response, nullptr, &action));
    return Status(Code::kUnavailable, chosen + ": its run was cancelled.");
  }
  if (waited_s > 2 * timeout_s_) {  // rank 0 would have answered long ago
    broken_ = Status(Code::kDeadlineExceeded,
                     queue_->choice().title + ": rank 0 chose it and did not answer within " +
                         Seconds(2 * timeout_s_) + ". See its log for the reason.");
  }
  return broken_;
}

}  // namespace ddl
