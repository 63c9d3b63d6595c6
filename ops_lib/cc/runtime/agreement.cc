#include "runtime/agreement.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/log.h"
#include "core/stall.h"
#include "runtime/description.h"

namespace ddl {
namespace {

// First byte of a verdict; the second is the Code, the rest the message.
constexpr char kAgreed = 'A';
constexpr char kRollCall = 'W';  // rank 0 is here and waits for others; answered with kHere
constexpr char kFailed = 'F';
constexpr char kBroken = 'B';

// Polls of a member between its limit and giving up; about 1 ms each.
constexpr int kLatePolls = 100;

// Time waited, and sleeps that grow with it: a late peer costs at most an eighth more, and a long
// wait a thousand short polls a second.
class Wait {
 public:
  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void Pause() const {
    const double elapsed = elapsed_s();
    if (elapsed < 20e-6) {
      sched_yield();
    } else {
      usleep(static_cast<useconds_t>(std::clamp(elapsed / 8 * 1e6, 5.0, 1000.0)));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

Agreement::Agreement(Communicator* communicator, double timeout_s)
    : communicator_(communicator), timeout_s_(timeout_s) {}

Status Agreement::Agree(const std::string& description, const SmallTensor* tensor) {
  DDL_RETURN_IF_ERROR(broken_);
  if (communicator_->size() == 1) return Status();
  return communicator_->CanMeet() ? AgreeInMeeting(description, tensor)
                                  : AgreeOverRoot(description);
}

Status Agreement::AgreeInMeeting(const std::string& description, const SmallTensor* tensor) {
  Offer offer;
  Digest(Essence(description), offer.digest);
  offer.leaving = description == kLeave;
  offer.title = Title(description);
  if (tensor != nullptr) {
    offer.in = tensor->in;
    offer.out = tensor->out;
    offer.count = tensor->count;
    offer.dtype = tensor->dtype;
    offer.divisor = tensor->divisor;
  }
  bool alike = false;
  broken_ = communicator_->Meet(offer, &alike);
  if (!broken_.ok() || alike) return broken_;
  // All ranks are here and see that they differ. In what, their descriptions tell.
  DDL_RETURN_IF_ERROR(AgreeOverRoot(description));
  return Status(Code::kInternal, Title(description) +
                                     ": digests differ where descriptions do not. Do all ranks "
                                     "run the same build of ddl?");
}

Status Agreement::AgreeOverRoot(const std::string& description) {
  return communicator_->rank() == 0 ? AgreeAsRoot(description) : AgreeAsMember(description);
}

Status Agreement::Leave() { return Agree(kLeave); }

Status Agreement::AgreeAsRoot(const std::string& description) {
  const int size = communicator_->size();
  std::vector<std::string> descriptions(size);
  std::vector<bool> arrived(size, false);
  descriptions[0] = description;
  arrived[0] = true;
  int count = 1;
  // The rank that left and one that runs a collective, or -1.
  int leaver = description == kLeave ? 0 : -1;
  int worker = description == kLeave ? -1 : 0;

  // After a long absence of this rank a member may have given up, and its message saying so may
  // still be on the way: then each must answer a roll call before it counts as here. A shorter
  // absence is safe without, because members start to wait after the last verdict.
  const bool doubtful = !verdict_sent_ || std::chrono::steady_clock::now() - verdict_sent_at_ >
                                              std::chrono::duration<double>(timeout_s_ / 2);
  std::vector<int> unanswered(size, 0);

  const Wait wait;
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
      if (message == kHere) {
        --unanswered[rank];
        continue;
      }
      if (message == kWithdrawn) {
        return SendVerdict(
            Status(Code::kDeadlineExceeded,
                   Title(descriptions[rank]) + ": rank " + std::to_string(rank) +
                       " waited longer than " + Seconds(timeout_s_) +
                       " for rank 0 and gave up. Raise DDL_STALL_TIMEOUT if rank 0 needs so long."),
            true);
      }
      descriptions[rank] = std::move(message);
      arrived[rank] = true;
      ++count;
      if (doubtful) {
        DDL_RETURN_IF_ERROR(communicator_->Send(rank, std::string(1, kRollCall)));
        ++unanswered[rank];
      }
      if (descriptions[rank] == kLeave) {
        leaver = rank;
      } else if (worker < 0) {
        worker = rank;
        worker_since_s = wait.elapsed_s();
        next_roll_call_s = worker_since_s + timeout_s_ / 4;
      }
    }
    if (leaver >= 0 && worker >= 0) {
      return SendVerdict(
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
      if (waited_s > timeout_s_) {
        return SendVerdict(
            Status(Code::kDeadlineExceeded,
                   Title(descriptions[worker]) + ": " + Missing(arrived) + " did not come within " +
                       Seconds(timeout_s_) +
                       ". Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT if "
                       "it needs so long."),
            true);
      }
      if (warnings.Due(waited_s)) {
        LogLine(0, Title(descriptions[worker]) + ": waiting for " + Missing(arrived) + " since " +
                       Seconds(waited_s) + " (limit " + Seconds(timeout_s_) + ")");
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
  return SendVerdict(Compare(descriptions), false);
}

Status Agreement::SendVerdict(const Status& verdict, bool breaks_group) {
  std::string message(1, verdict.ok() ? kAgreed : breaks_group ? kBroken : kFailed);
  message += static_cast<char>(verdict.code());
  message += verdict.message();
  // Also to ranks that are still missing: they find the verdict when they come.
  for (int rank = 1; rank < communicator_->size(); ++rank) {
    DDL_RETURN_IF_ERROR(communicator_->Send(rank, message));
  }
  verdict_sent_ = true;
  verdict_sent_at_ = std::chrono::steady_clock::now();
  if (breaks_group) broken_ = verdict;
  return verdict;
}

Status Agreement::AgreeAsMember(const std::string& description) {
  const bool leaving = description == kLeave;
  DDL_RETURN_IF_ERROR(communicator_->Send(0, description));
  const Wait wait;
  WarningSchedule warnings(timeout_s_);
  double heard_s = 0;  // when rank 0 was last known to be here
  int late_polls = 0;
  while (true) {
    std::string message;
    bool received = false;
    DDL_RETURN_IF_ERROR(communicator_->TryReceive(0, &message, &received));
    if (received && message[0] != kRollCall) {
      if (message[0] == kAgreed) return Status();
      const Status verdict(static_cast<Code>(message[1]), message.substr(2));
      if (message[0] == kBroken) broken_ = verdict;
      return verdict;
    }
    const double elapsed_s = wait.elapsed_s();
    if (received) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, kHere));
      heard_s = elapsed_s;
      late_polls = 0;
    }
    // This thread may have slept through the limit while a verdict lay ready, so it looks a few
    // more times: after this message nothing that rank 0 says is heard.
    if (!leaving && elapsed_s - heard_s > timeout_s_ && ++late_polls > kLatePolls) {
      DDL_RETURN_IF_ERROR(communicator_->Send(0, kWithdrawn));
      broken_ = Status(Code::kDeadlineExceeded,
                       Title(description) + ": rank 0 did not come within " + Seconds(timeout_s_) +
                           ". Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT if "
                           "it needs so long.");
      return broken_;
    }
    if (!leaving && heard_s == 0 && warnings.Due(elapsed_s)) {
      LogLine(communicator_->rank(), Title(description) + ": waiting for rank 0 since " +
                                         Seconds(elapsed_s) + " (limit " + Seconds(timeout_s_) +
                                         ")");
    }
    wait.Pause();
  }
}

}  // namespace ddl
