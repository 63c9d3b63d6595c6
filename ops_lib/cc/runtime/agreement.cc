#include "runtime/agreement.h"

#include <algorithm>
#include <chrono>

#include "core/log.h"
#include "core/pause.h"
#include "core/stall.h"
#include "runtime/description.h"

namespace ddl {
namespace {

// First byte of what rank 0 sends.
constexpr char kAgreed = 'A';
constexpr char kFailed = 'F';    // then the Code, then the message
constexpr char kBroken = 'B';    // the same, and it is so for ever
constexpr char kChoice = 'C';    // the order differs; then what rank 0 has pending, a line for each
constexpr char kRollCall = 'W';  // rank 0 is here and waits for others; answered with kHere

// First byte of what the others send.
constexpr char kOrdered = 'O';    // then a description
constexpr char kUnordered = 'U';  // then a description
constexpr char kLeave = 'L';      // this rank's script has ended
constexpr char kHere = 'H';
constexpr char kWithdrawn = 'X';  // this rank gave up waiting for rank 0
constexpr char kInstead = 'I';    // rank 0's choice is not here yet; then what is

// Polls of a member between its limit and giving up; about 1 ms each.
constexpr int kLatePolls = 100;

// Others compute while a rank waits here, often for milliseconds: soon leave them the core.
constexpr double kYieldS = 20e-6;

std::string Encode(const std::vector<Turn>& order) {
  std::string text(1, kChoice);
  for (const Turn& turn : order) {
    text += (turn.ordered ? kOrdered : kUnordered) + turn.title + "\n";
  }
  return text;
}

std::vector<Turn> Decode(const std::string& text) {
  std::vector<Turn> order;
  for (size_t at = 1; at < text.size();) {
    const size_t end = text.find('\n', at);
    order.push_back({text.substr(at + 1, end - at - 1), text[at] == kOrdered});
    at = end + 1;
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

}  // namespace

// What this rank brings.
struct Agreement::Ask {
  std::string description;
  bool ordered = true;
  bool leaving = false;
  bool gives_way = false;
  const SmallTensor* tensor = nullptr;

  std::string title() const { return leaving ? "Leave" : Title(description); }
  std::string message() const {
    return leaving ? std::string(1, kLeave) : (ordered ? kOrdered : kUnordered) + description;
  }
};

Agreement::Agreement(Communicator* communicator, Negotiator* negotiator, double timeout_s)
    : communicator_(communicator), negotiator_(negotiator), timeout_s_(timeout_s) {}

Status Agreement::Agree(const Request& request, const SmallTensor* tensor, Accord* accord) {
  Ask ask;
  ask.description = Describe(request);
  ask.ordered = request.ordered;
  ask.gives_way = request.gives_way;
  ask.tensor = tensor;
  return AgreeOn(ask, accord);
}

Status Agreement::Leave() {
  Ask ask;
  ask.leaving = true;
  Accord accord;
  return AgreeOn(ask, &accord);
}

Status Agreement::AgreeOn(const Ask& ask, Accord* accord) {
  *accord = Accord::kRun;
  DDL_RETURN_IF_ERROR(broken_);
  if (communicator_->size() == 1) return Status();
  if (negotiating_ || !communicator_->CanMeet()) return AgreeOverRoot(ask, accord);
  Offer offer;
  Digest(Essence(ask.description), offer.digest);
  offer.leaving = ask.leaving;
  offer.title = ask.title();
  if (ask.tensor != nullptr) {
    offer.in = ask.tensor->in;
    offer.out = ask.tensor->out;
    offer.count = ask.tensor->count;
    offer.dtype = ask.tensor->dtype;
    offer.divisor = ask.tensor->divisor;
  }
  bool alike = false;
  broken_ = communicator_->Meet(offer, &alike);
  DDL_RETURN_IF_ERROR(broken_);
  if (alike) {
    if (ask.tensor != nullptr) *accord = Accord::kSummed;
    return Status();
  }
  // All ranks are here and see that they differ. In what, their descriptions tell.
  together_ = true;
  together_at_ = Clock::now();
  DDL_RETURN_IF_ERROR(AgreeOverRoot(ask, accord));
  if (*accord == Accord::kAnotherFirst) return Status();
  return Status(Code::kInternal, ask.title() + ": digests differ where descriptions do not. Do all "
                                               "ranks run the same build of ddl?");
}

Status Agreement::AgreeOverRoot(const Ask& ask, Accord* accord) {
  const Status status =
      communicator_->rank() == 0 ? AgreeAsRoot(ask, accord) : AgreeAsMember(ask, accord);
  negotiating_ = status.ok() && *accord == Accord::kAnotherFirst;
  told_ = false;
  return status;
}

Status Agreement::AgreeAsRoot(const Ask& ask, Accord* accord) {
  const int size = communicator_->size();
  std::vector<std::string> descriptions(size), instead(size);
  std::vector<bool> arrived(size, false), ordered(size, true);
  descriptions[0] = ask.description;
  ordered[0] = ask.ordered;
  arrived[0] = true;
  int count = 1;
  // The rank that left and one that runs a collective, or -1.
  int leaver = ask.leaving ? 0 : -1;
  int worker = ask.leaving ? -1 : 0;

  // After a long absence of this rank a member may have given up, and its message saying so may
  // still be on the way: then each must answer a roll call before it counts as here. A shorter
  // absence is safe without, because members start to wait after the last verdict.
  const bool doubtful =
      !together_ || Clock::now() - together_at_ > std::chrono::duration<double>(timeout_s_ / 2);
  std::vector<int> unanswered(size, 0);

  const Pauses wait(kYieldS);
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
      if (kind == kWithdrawn) {
        return Fail(
            Status(Code::kDeadlineExceeded,
                   Title(descriptions[rank]) + ": rank " + std::to_string(rank) +
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
      if (kind == kLeave) {
        leaver = rank;
        continue;
      }
      ordered[rank] = kind == kOrdered;
      descriptions[rank] = message.substr(1);
      if (worker < 0) {
        worker = rank;
        worker_since_s = wait.elapsed_s();
        next_roll_call_s = worker_since_s + timeout_s_ / 4;
      }
    }
    if (leaver >= 0 && worker >= 0) {
      return Fail(
          Status(Code::kFailedPrecondition,
                 Title(descriptions[worker]) + ": rank " + std::to_string(leaver) +
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
      if (ask.gives_way && count < size && all_lack) {
        return Fail(Status(Code::kUnavailable, Title(descriptions[0]) + ": " + Missing(arrived) +
                                                   " did not call it" + others + "."),
                    false);
      }
      if (waited_s > timeout_s_) {
        return Fail(Status(Code::kDeadlineExceeded,
                           Title(descriptions[worker]) + ": " + Missing(arrived) +
                               " did not come within " + Seconds(timeout_s_) + others +
                               ". Look for what keeps it busy or blocked; raise "
                               "DDL_STALL_TIMEOUT if it needs so long."),
                    true);
      }
      if (warnings.Due(waited_s)) {
        LogLine(0, Title(descriptions[worker]) + ": waiting for " + Missing(arrived) + " since " +
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
  bool same = false;
  if (const Status status = Decide(descriptions, ordered, &same); !status.ok()) {
    return Fail(status, std::find(ordered.begin(), ordered.end(), false) != ordered.end());
  }
  if (same) return SendToAll(std::string(1, kAgreed));
  const std::vector<Turn> order = negotiator_->Order();
  *accord = Accord::kAnotherFirst;
  negotiator_->Follow(order);
  return SendToAll(Encode(order));
}

Status Agreement::Fail(const Status& reason, bool breaks_group) {
  std::string verdict(1, breaks_group ? kBroken : kFailed);
  verdict += static_cast<char>(reason.code());
  verdict += reason.message();
  if (breaks_group) broken_ = reason;
  DDL_RETURN_IF_ERROR(SendToAll(verdict));
  return reason;
}

void Agreement::Break(const Status& reason) {
  if (communicator_->size() > 1 && broken_.ok()) broken_ = reason;
}

Status Agreement::SendToAll(const std::string& verdict) {
  // Also to ranks that are still missing: they find the verdict when they come.
  for (int rank = 1; rank < communicator_->size(); ++rank) {
    DDL_RETURN_IF_ERROR(communicator_->Send(rank, verdict));
  }
  together_ = true;
  together_at_ = Clock::now();
  return Status();
}

Status Agreement::AgreeAsMember(const Ask& ask, Accord* accord) {
  DDL_RETURN_IF_ERROR(communicator_->Send(0, ask.message()));
  const Pauses wait(kYieldS);
  WarningSchedule warnings(timeout_s_);
  double heard_s = 0;  // when rank 0 was last known to be here
  int late_polls = 0;
  while (true) {
    std::string message;
    bool received = false;
    DDL_RETURN_IF_ERROR(communicator_->TryReceive(0, &message, &received));
    if (received && message[0] != kRollCall) return Receive(message, accord);
    const double elapsed_s = wait.elapsed_s();
    if (received) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, std::string(1, kHere)));
      heard_s = elapsed_s;
      late_polls = 0;
    }
    // This thread may have slept through the limit while a verdict lay ready, so it looks a few
    // more times: after this message nothing that rank 0 says is heard.
    if (!ask.leaving && elapsed_s - heard_s > timeout_s_ && ++late_polls > kLatePolls) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, std::string(1, kWithdrawn)));
      broken_ = Status(Code::kDeadlineExceeded,
                       ask.title() + ": rank 0 did not come within " + Seconds(timeout_s_) +
                           ". Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT if "
                           "it needs so long.");
      return broken_;
    }
    if (!ask.leaving && heard_s == 0 && warnings.Due(elapsed_s)) {
      LogLine(communicator_->rank(), ask.title() + ": waiting for rank 0 since " +
                                         Seconds(elapsed_s) + " (limit " + Seconds(timeout_s_) +
                                         ")");
    }
    wait.Pause();
  }
}

Status Agreement::Receive(const std::string& verdict, Accord* accord) {
  together_ = true;
  together_at_ = Clock::now();
  if (verdict[0] == kAgreed) return Status();
  if (verdict[0] == kChoice) {
    *accord = Accord::kAnotherFirst;
    negotiator_->Follow(Decode(verdict));
    return Status();
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
  Accord accord;
  if (received) {
    negotiating_ = false;
    told_ = false;
    return Receive(verdict, &accord);
  }
  if (waited_s > 2 * timeout_s_) {  // rank 0 would have spoken long ago
    broken_ = Status(Code::kDeadlineExceeded,
                     negotiator_->choice().title + ": rank 0 chose it and was not heard of within " +
                         Seconds(2 * timeout_s_) + ". See its log for the reason.");
  }
  return broken_;
}

}  // namespace ddl
