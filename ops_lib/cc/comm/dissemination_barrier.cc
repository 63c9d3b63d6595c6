#include "comm/dissemination_barrier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/log.h"
#include "core/backoff.h"

namespace ddl {
namespace {

// First byte of a message; then, but for kBroken, the number of the barrier.
constexpr char kSummary = 'K';    // then a Summary, which begins with that number
constexpr char kComplete = 'C';   // all ranks of the sender's group have arrived
constexpr char kMissing = 'L';    // then the ranks that have not, as int32
constexpr char kCancelled = 'T';  // a rank of the sender's group has cancelled
constexpr char kLimited = 'W';    // to the own leader: the sender's wait is limited
constexpr char kUnlimited = 'U';  // it is not
constexpr char kBroken = 'G';     // then the Code, then the message

std::string Message(char kind, const void* bytes, size_t nbytes) {
  std::string message(1 + nbytes, kind);
  std::memcpy(message.data() + 1, bytes, nbytes);
  return message;
}

constexpr int kFirstPolls = 3;

// Of two ranks; -1 stands for none.
int FirstOf(int a, int b) { return a < 0 ? b : b < 0 ? a : std::min(a, b); }

}  // namespace

DisseminationBarrier::DisseminationBarrier(Messenger* messenger,
                                           std::vector<std::vector<int>> groups, double timeout_s)
    : messenger_(messenger),
      groups_(std::move(groups)),
      timeout_s_(timeout_s),
      report_after_s_(std::min(1.0, timeout_s / 8)),
      group_of_(messenger->size(), 0),
      inbox_(groups_.size()),
      presence_(groups_.size()),
      warnings_(timeout_s) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    for (const int rank : groups_[group]) group_of_[rank] = static_cast<int>(group);
  }
  own_ = group_of_[messenger->rank()];
}

void DisseminationBarrier::Begin() {
  ++number_;
  reported_missing_.clear();
  reported_limit_ = true;
  grace_polls_ = 0;
  limited_.assign(group_of_.size(), true);
  announced_ = false;
  began_ = Clock::now();
  since_last_.Restart();
  warnings_ = WarningSchedule(timeout_s_);
}

Status DisseminationBarrier::ArriveAndWait(const Arrival& arrival, BarrierResult within,
                                           BarrierResult* result) {
  DDL_RETURN_IF_ERROR(broken_);
  within_ = within;
  since_last_.Restart();
  // MPI may have to be asked more than once before it shows what came while nobody looked.
  for (int look = 0; look < kFirstPolls; ++look) DDL_RETURN_IF_ERROR(Poll());
  summary_ = {};
  summary_.number = number_;
  std::copy(arrival.digest, arrival.digest + 2, summary_.digest);
  summary_.leaver = arrival.leaving ? messenger_->rank() : -1;
  summary_.active = arrival.leaving ? -1 : messenger_->rank();
  summary_.mismatch = within == BarrierResult::kMismatch;
  summary_.cancelled =
      within == BarrierResult::kCancelled || cancelled_barrier_ == number_ || arrival.IsCancelled();
  const int size = static_cast<int>(groups_.size());
  for (int step = 1; step < size; step *= 2) {
    DDL_RETURN_IF_ERROR(messenger_->Send(groups_[(own_ + step) % size][0],
                                         Message(kSummary, &summary_, sizeof summary_),
                                         MessageTag::kBarrier));
    Summary theirs = {};
    DDL_RETURN_IF_ERROR(Await((own_ - step + size) % size, arrival, &theirs));
    summary_.mismatch = summary_.mismatch || theirs.mismatch ||
                        !std::equal(theirs.digest, theirs.digest + 2, summary_.digest);
    summary_.cancelled = summary_.cancelled || theirs.cancelled;
    summary_.leaver = FirstOf(summary_.leaver, theirs.leaver);
    summary_.active = FirstOf(summary_.active, theirs.active);
    if (summary_.leaver >= 0 && summary_.active >= 0) return LeaverError(arrival);
  }
  *result = summary_.cancelled  ? BarrierResult::kCancelled
            : summary_.mismatch ? BarrierResult::kMismatch
                                : BarrierResult::kMatch;
  return Status();
}

Status DisseminationBarrier::Await(int group, const Arrival& arrival, Summary* theirs) {
  const Backoff backoff;
  while (true) {
    DDL_RETURN_IF_ERROR(Poll());
    if (!inbox_[group].empty()) break;
    if (arrival.while_waiting) DDL_RETURN_IF_ERROR(arrival.while_waiting(Arrived()));
    if (arrival.IsCancelled()) DDL_RETURN_IF_ERROR(Cancel());
    const double waited_s = since_last_.Poll();
    if (std::chrono::duration<double>(Clock::now() - began_).count() > report_after_s_) {
      DDL_RETURN_IF_ERROR(CheckStall(arrival, waited_s));
    }
    backoff.Pause();
  }
  *theirs = inbox_[group].front();
  inbox_[group].pop_front();
  if (theirs->number == number_) return Status();
  Break(Status(Code::kInternal, "ranks " + std::to_string(messenger_->rank()) + " and " +
                                    std::to_string(groups_[group][0]) +
                                    " are not at the same barrier."));
  return broken_;
}

Status DisseminationBarrier::Poll() {
  while (broken_.ok()) {
    std::string message;
    int rank = -1;
    DDL_RETURN_IF_ERROR(messenger_->TryReceiveAny(&rank, &message, MessageTag::kBarrier));
    if (rank < 0) break;
    if (message[0] == kBroken) {
      broken_ = Status(static_cast<Code>(message[1]), message.substr(2));
      break;
    }
    const int group = group_of_[rank];
    uint64_t number = 0;
    std::memcpy(&number, message.data() + 1, sizeof number);
    if (message[0] == kSummary) {
      inbox_[group].emplace_back();
      std::memcpy(&inbox_[group].back(), message.data() + 1, sizeof(Summary));
    }
    if (message[0] == kCancelled) {
      cancelled_barrier_ = std::max(cancelled_barrier_, number);
      continue;
    }
    if (message[0] == kLimited || message[0] == kUnlimited) {
      if (number == number_) limited_[rank] = message[0] == kLimited;
      continue;
    }
    Presence& presence = presence_[group];
    if (number < presence.number) continue;  // another rank of that group was faster
    if (number > presence.number) presence = {number, false, {}};
    if (message[0] != kMissing) {
      presence.complete = true;
    } else {
      presence.missing.resize((message.size() - 1 - sizeof number) / sizeof(int));
      std::memcpy(presence.missing.data(), message.data() + 1 + sizeof number,
                  presence.missing.size() * sizeof(int));
    }
    since_last_.Restart();
  }
  return broken_;
}

Status DisseminationBarrier::SendToOthers(const std::string& message) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (static_cast<int>(group) == own_) continue;
    DDL_RETURN_IF_ERROR(messenger_->Send(groups_[group][0], message, MessageTag::kBarrier));
  }
  return Status();
}

Status DisseminationBarrier::Cancel() {
  if (cancelled_barrier_ == number_) return Status();
  cancelled_barrier_ = number_;
  return SendToOthers(Message(kCancelled, &number_, sizeof number_));
}

std::vector<bool> DisseminationBarrier::Arrived() const {
  std::vector<bool> arrived(group_of_.size(), true);
  for (size_t group = 0; group < groups_.size(); ++group) {
    const Presence& presence = presence_[group];
    const bool known = presence.number == number_;
    if (static_cast<int>(group) == own_ || (known && presence.complete)) continue;
    for (const int rank : known ? presence.missing : groups_[group]) {
      arrived[rank] = false;
    }
  }
  return arrived;
}

bool DisseminationBarrier::IsLimited(const Arrival& arrival) const {
  if (arrival.leaving) return false;
  if (within_ == BarrierResult::kMismatch || arrival.IsLimited()) return true;
  return std::any_of(groups_[own_].begin() + 1, groups_[own_].end(),
                     [this](int rank) { return limited_[rank]; });
}

Status DisseminationBarrier::CheckStall(const Arrival& arrival, double waited_s) {
  if (!announced_) {
    announced_ = true;
    DDL_RETURN_IF_ERROR(SendToOthers(Message(kComplete, &number_, sizeof number_)));
  }
  if (!IsLimited(arrival)) {
    since_last_.Restart();
    return Status();
  }
  const std::vector<bool> arrived = Arrived();
  const bool all = std::find(arrived.begin(), arrived.end(), false) == arrived.end();
  // A leader that has reported its arrival, and then nothing.
  const std::string missing = all ? "another host" : Missing(arrived);
  const std::string title = arrival.title ? arrival.title() : "A collective";
  const std::string limit = Seconds(timeout_s_);
  grace_polls_ = waited_s > timeout_s_ ? grace_polls_ + 1 : 0;
  if (grace_polls_ > kGracePolls) {
    Break(Status(Code::kDeadlineExceeded,
                 title + ": " + missing + " did not come within " + limit + "; rank " +
                     std::to_string(messenger_->rank()) + " waited longer than " + limit +
                     " and gave up. Look for what keeps it busy or blocked; raise "
                     "DDL_STALL_TIMEOUT if it needs so long."));
    return broken_;
  }
  const bool first = std::find(arrived.begin(), arrived.end(), true) - arrived.begin() ==
                     groups_[own_][0];
  if (first && warnings_.Due(waited_s)) {
    LogLine(messenger_->rank(), title + ": waited " + Seconds(waited_s) + " for " + missing +
                                    " so far (limit " + limit + ")");
  }
  return Status();
}

Status DisseminationBarrier::LeaverError(const Arrival& arrival) {
  const std::string leaver = std::to_string(summary_.leaver),
                    active = std::to_string(summary_.active);
  const Status reason(Code::kFailedPrecondition,
                      (arrival.title ? arrival.title() : "A collective") + ": rank " + leaver +
                          " has already ended its script, but rank " + active +
                          " still runs this collective. Let all ranks do the same number of "
                          "steps, and look for an early exit on rank " +
                          leaver + ".");
  // Ranks that stay can name their collective.
  if (!arrival.leaving) Break(reason);
  broken_ = reason;
  return broken_;
}

Status DisseminationBarrier::ReportMissing(const std::vector<int>& missing, double waited_s) {
  if (waited_s < report_after_s_ || missing == reported_missing_) return Status();
  reported_missing_ = missing;
  std::string message = Message(kMissing, &number_, sizeof number_);
  message.append(reinterpret_cast<const char*>(missing.data()), missing.size() * sizeof(int));
  return SendToOthers(message);
}

Status DisseminationBarrier::ReportLimit(bool limited, double waited_s) {
  if (waited_s < report_after_s_ || limited == reported_limit_) return Status();
  reported_limit_ = limited;
  return messenger_->Send(groups_[own_][0],
                          Message(limited ? kLimited : kUnlimited, &number_, sizeof number_),
                          MessageTag::kBarrier);
}

void DisseminationBarrier::Break(const Status& reason) {
  if (!broken_.ok()) return;  // whoever broke it has told all leaders
  std::string message(1, kBroken);
  message += static_cast<char>(reason.code());
  message += reason.message();
  broken_ = reason;
  (void)SendToOthers(message);  // whoever does not get it waits until its own limit
}

}  // namespace ddl
