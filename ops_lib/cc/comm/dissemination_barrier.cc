#include "comm/dissemination_barrier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/log.h"
#include "core/pause.h"

namespace ddl {
namespace {

// First byte of a message; then, but for kGivenUp, the number of the barrier.
constexpr char kKnown = 'K';     // then a Knowledge, which begins with that number
constexpr char kComplete = 'C';  // all ranks of the sender's group are there
constexpr char kLacks = 'L';     // then the ranks that are not, as int32
constexpr char kTakenBack = 'T';
constexpr char kLimited = 'W';   // to the own leader: the sender's wait is limited
constexpr char kUnlimited = 'U'; // it is not
constexpr char kGivenUp = 'G';   // then the Code, then the message

std::string Message(char kind, const void* bytes, size_t nbytes) {
  std::string message(1 + nbytes, kind);
  std::memcpy(message.data() + 1, bytes, nbytes);
  return message;
}

constexpr int kLooks = 3;

int Earlier(int a, int b) { return a < 0 ? b : b < 0 ? a : std::min(a, b); }

}  // namespace

DisseminationBarrier::DisseminationBarrier(Messenger* messenger,
                                           std::vector<std::vector<int>> groups, double timeout_s)
    : messenger_(messenger),
      groups_(std::move(groups)),
      timeout_s_(timeout_s),
      moment_s_(std::min(1.0, timeout_s / 8)),
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
  reported_.clear();
  reported_limit_ = true;
  late_polls_ = 0;
  limited_.assign(group_of_.size(), true);
  announced_ = false;
  began_ = since_ = Clock::now();
  warnings_ = WarningSchedule(timeout_s_);
}

Status DisseminationBarrier::Meet(const Offer& offer, Met within, Met* met) {
  DDL_RETURN_IF_ERROR(broken_);
  within_ = within;
  since_ = Clock::now();
  // MPI may have to be asked more than once before it shows what came while nobody looked.
  for (int look = 0; look < kLooks; ++look) DDL_RETURN_IF_ERROR(Heard());
  known_ = {};
  known_.number = number_;
  std::copy(offer.digest, offer.digest + 2, known_.digest);
  known_.leaver = offer.leaving ? messenger_->rank() : -1;
  known_.worker = offer.leaving ? -1 : messenger_->rank();
  known_.different = within == Met::kDifferent;
  known_.withdrawn = within == Met::kWithdrawn || taken_back_ == number_ || offer.IsWithdrawn();
  const int size = static_cast<int>(groups_.size());
  for (int step = 1; step < size; step *= 2) {
    DDL_RETURN_IF_ERROR(messenger_->Send(groups_[(own_ + step) % size][0],
                                         Message(kKnown, &known_, sizeof known_),
                                         Channel::kBarrier));
    Knowledge theirs = {};
    DDL_RETURN_IF_ERROR(Await((own_ - step + size) % size, offer, &theirs));
    known_.different = known_.different || theirs.different ||
                       !std::equal(theirs.digest, theirs.digest + 2, known_.digest);
    known_.withdrawn = known_.withdrawn || theirs.withdrawn;
    known_.leaver = Earlier(known_.leaver, theirs.leaver);
    known_.worker = Earlier(known_.worker, theirs.worker);
    if (known_.leaver >= 0 && known_.worker >= 0) return LeftAlone(offer);
  }
  *met = known_.withdrawn   ? Met::kWithdrawn
         : known_.different ? Met::kDifferent
                            : Met::kAlike;
  return Status();
}

Status DisseminationBarrier::Await(int group, const Offer& offer, Knowledge* theirs) {
  const Pauses wait;
  while (true) {
    DDL_RETURN_IF_ERROR(Heard());
    if (!inbox_[group].empty()) break;
    if (offer.waiting) DDL_RETURN_IF_ERROR(offer.waiting(Arrived()));
    if (offer.IsWithdrawn()) DDL_RETURN_IF_ERROR(TakeBack());
    if (std::chrono::duration<double>(Clock::now() - began_).count() > moment_s_) {
      DDL_RETURN_IF_ERROR(LookAround(offer));
    }
    wait.Pause();
  }
  *theirs = inbox_[group].front();
  inbox_[group].pop_front();
  if (theirs->number == number_) return Status();
  Break(Status(Code::kInternal, "ranks " + std::to_string(messenger_->rank()) + " and " +
                                    std::to_string(groups_[group][0]) +
                                    " are not at the same barrier."));
  return broken_;
}

Status DisseminationBarrier::Heard() {
  while (broken_.ok()) {
    std::string message;
    int rank = -1;
    DDL_RETURN_IF_ERROR(messenger_->TryReceiveAny(&rank, &message, Channel::kBarrier));
    if (rank < 0) break;
    if (message[0] == kGivenUp) {
      broken_ = Status(static_cast<Code>(message[1]), message.substr(2));
      break;
    }
    const int group = group_of_[rank];
    uint64_t number = 0;
    std::memcpy(&number, message.data() + 1, sizeof number);
    if (message[0] == kKnown) {
      inbox_[group].emplace_back();
      std::memcpy(&inbox_[group].back(), message.data() + 1, sizeof(Knowledge));
    }
    if (message[0] == kTakenBack) {
      taken_back_ = std::max(taken_back_, number);
      continue;
    }
    if (message[0] == kLimited || message[0] == kUnlimited) {
      if (number == number_) limited_[rank] = message[0] == kLimited;
      continue;
    }
    Presence& presence = presence_[group];
    if (number < presence.number) continue;  // another rank of that group was faster
    if (number > presence.number) presence = {number, false, {}};
    if (message[0] != kLacks) {
      presence.complete = true;
    } else {
      presence.missing.resize((message.size() - 1 - sizeof number) / sizeof(int));
      std::memcpy(presence.missing.data(), message.data() + 1 + sizeof number,
                  presence.missing.size() * sizeof(int));
    }
    since_ = Clock::now();
  }
  return broken_;
}

Status DisseminationBarrier::SendToOthers(const std::string& message) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (static_cast<int>(group) == own_) continue;
    DDL_RETURN_IF_ERROR(messenger_->Send(groups_[group][0], message, Channel::kBarrier));
  }
  return Status();
}

Status DisseminationBarrier::TakeBack() {
  if (taken_back_ == number_) return Status();
  taken_back_ = number_;
  return SendToOthers(Message(kTakenBack, &number_, sizeof number_));
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

bool DisseminationBarrier::IsLimited(const Offer& offer) const {
  if (offer.leaving) return false;
  if (within_ == Met::kDifferent || offer.IsLimited()) return true;
  return std::any_of(groups_[own_].begin() + 1, groups_[own_].end(),
                     [this](int rank) { return limited_[rank]; });
}

Status DisseminationBarrier::LookAround(const Offer& offer) {
  if (!announced_) {
    announced_ = true;
    DDL_RETURN_IF_ERROR(SendToOthers(Message(kComplete, &number_, sizeof number_)));
  }
  if (!IsLimited(offer)) {
    since_ = Clock::now();
    return Status();
  }
  const std::vector<bool> arrived = Arrived();
  const bool all = std::find(arrived.begin(), arrived.end(), false) == arrived.end();
  // A leader that has said it is there, and then nothing.
  const std::string missing = all ? "another host" : Missing(arrived);
  const double waited_s = std::chrono::duration<double>(Clock::now() - since_).count();
  const std::string title = offer.title ? offer.title() : "A collective";
  const std::string limit = Seconds(timeout_s_);
  late_polls_ = waited_s > timeout_s_ ? late_polls_ + 1 : 0;
  if (late_polls_ > kLatePolls) {
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
    LogLine(messenger_->rank(), title + ": waiting for " + missing + " since " +
                                    Seconds(waited_s) + " (limit " + limit + ")");
  }
  return Status();
}

Status DisseminationBarrier::LeftAlone(const Offer& offer) {
  const std::string leaver = std::to_string(known_.leaver), worker = std::to_string(known_.worker);
  const Status reason(Code::kFailedPrecondition,
                      (offer.title ? offer.title() : "A collective") + ": rank " + leaver +
                          " has already ended its script, but rank " + worker +
                          " still runs this collective. Let all ranks do the same number of "
                          "steps, and look for an early exit on rank " +
                          leaver + ".");
  // Those who stay know what they were about to do.
  if (!offer.leaving) Break(reason);
  broken_ = reason;
  return broken_;
}

Status DisseminationBarrier::Report(const std::vector<int>& missing, double waited_s) {
  if (waited_s < moment_s_ || missing == reported_) return Status();
  reported_ = missing;
  std::string message = Message(kLacks, &number_, sizeof number_);
  message.append(reinterpret_cast<const char*>(missing.data()), missing.size() * sizeof(int));
  return SendToOthers(message);
}

Status DisseminationBarrier::ReportLimit(bool limited, double waited_s) {
  if (waited_s < moment_s_ || limited == reported_limit_) return Status();
  reported_limit_ = limited;
  return messenger_->Send(groups_[own_][0],
                          Message(limited ? kLimited : kUnlimited, &number_, sizeof number_),
                          Channel::kBarrier);
}

void DisseminationBarrier::Break(const Status& reason) {
  if (!broken_.ok()) return;  // who said it has told all leaders
  std::string message(1, kGivenUp);
  message += static_cast<char>(reason.code());
  message += reason.message();
  broken_ = reason;
  (void)SendToOthers(message);  // whoever does not hear of it waits until its own limit
}

}  // namespace ddl
