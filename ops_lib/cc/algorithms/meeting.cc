#include "algorithms/meeting.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "algorithms/store_choice.h"
#include "core/log.h"
#include "core/stall.h"
#include "core/vector.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// One rank at one meeting.
class Attendance {
 public:
  Attendance(HostGroup* group, const Offer& offer)
      : group_(*group),
        offer_(offer),
        nbytes_(offer.count * static_cast<int64_t>(DTypeSize(offer.dtype))),
        meeting_(group->NextMeeting()),
        stores_(group),
        tuned_(nbytes_ >= kTunedBytes && stores_.chooses()) {}

  void Show() {
    HostGroup::Slot& mine = group_.slot(group_.rank(), meeting_);
    mine.digest[0] = offer_.digest[0];
    mine.digest[1] = offer_.digest[1];
    const Clock::time_point start = Start();
    if (nbytes_ >= kTunedBytes && stores_.Streams(StoreChoice::kSmallAllReduce, nbytes_)) {
      CopyBytes(mine.payload, offer_.in, nbytes_, true);
      FinishStreams();
    } else if (nbytes_ > 0) {
      std::memcpy(mine.payload, offer_.in, nbytes_);
    }
    Stop(start);
    mine.state.store(meeting_ << HostGroup::kFlagBits | (offer_.leaving ? HostGroup::kLeave : 0) |
                         (offer_.withdraws ? HostGroup::kTakesBack | HostGroup::kTaken : 0),
                     std::memory_order_release);
    group_.Notify();
  }

  // `withdrawn`: whether a rank has taken back what it showed.
  Status WaitForAll(bool* withdrawn) {
    int next = 0;  // all before it are here
    const auto all_here = [this, &next] {
      while (next < group_.size() && IsHere(next)) ++next;
      return next == group_.size();
    };
    const bool are_here = group_.SpinUntil(all_here);
    // Show has not waited until the others see what it showed: that takes as long as their answer,
    // so the two pass together. From here on they see it, as the doubt below needs, and this rank
    // sees whoever fell asleep before.
    group_.Fence();
    group_.Notify();
    if (!are_here) DDL_RETURN_IF_ERROR(WaitAsleep());
    // Looked at again now that all are here: whoever gave up before the last one came has shown its
    // doubt before, so a rank that sees no doubt here knows that nobody will.
    // The same holds for a rank that takes back what it showed; it says itself whether that was
    // before the last one came.
    bool doubt = false;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const uint64_t state = group_.slot(rank, meeting_).state.load();
      if (Leaves(state) != offer_.leaving) return LeftAlone();
      doubt = doubt || (state & HostGroup::kDoubt);
      if (state & HostGroup::kTakesBack) {
        DDL_RETURN_IF_ERROR(AwaitFlag(rank));
        const uint64_t answer = group_.slot(rank, meeting_).state.load();
        *withdrawn = *withdrawn || (answer & HostGroup::kTaken);
      }
    }
    if (doubt && !group_.Commit(meeting_)) return group_.status();
    return Status();
  }

  bool Alike() {
    for (int rank = 0; rank < group_.size(); ++rank) {
      const HostGroup::Slot& slot = group_.slot(rank, meeting_);
      if (slot.digest[0] != offer_.digest[0] || slot.digest[1] != offer_.digest[1]) return false;
    }
    return true;
  }

  void AddUp() {
    if (offer_.count == 0) return;
    const Clock::time_point start = Start();
    const void* sources[kMaxRanks];
    std::vector<const void*> many;
    const void** list = sources;
    if (group_.size() > kMaxRanks) {
      many.resize(group_.size());
      list = many.data();
    }
    for (int rank = 0; rank < group_.size(); ++rank) {
      list[rank] = group_.slot(rank, meeting_).payload;
    }
    Sum sum;
    sum.sources = list;
    sum.num_sources = group_.size();
    sum.out = offer_.out;
    sum.count = offer_.count;
    sum.dtype = offer_.dtype;
    sum.divisor = offer_.divisor;
    Compute(sum);
    Stop(start);
    if (tuned_) stores_.Tune(StoreChoice::kSmallAllReduce, nbytes_, seconds_);
  }

 private:
  static constexpr int kMaxRanks = 64;  // without an allocation
  // Of smaller ones the clock itself would be felt.
  static constexpr int64_t kTunedBytes = int64_t{8} << 10;

  // The wait for the others, between writing and reading, says nothing about the stores.
  Clock::time_point Start() const { return tuned_ ? Clock::now() : Clock::time_point(); }
  void Stop(Clock::time_point start) {
    if (tuned_) seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
  }

  std::string Title() const { return offer_.title ? offer_.title() : "A collective"; }

  std::string Name(int rank) const { return "rank " + std::to_string(group_.name(rank)); }

  std::string MissingOf(const std::vector<bool>& here) const {
    std::string text;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!here[rank]) text += (text.empty() ? "" : ", ") + Name(rank);
    }
    return text;
  }

  bool IsHere(int rank) const {
    return group_.slot(rank, meeting_).state.load() >> HostGroup::kFlagBits == meeting_;
  }

  // Whether a rank that takes back what it showed did so in time: it is about to say it.
  Status AwaitFlag(int rank) {
    const std::atomic<uint64_t>& state = group_.slot(rank, meeting_).state;
    return group_.Await(rank, [&state] {
      return (state.load() & (HostGroup::kTaken | HostGroup::kTooLate)) != 0;
    });
  }

  // Whoever comes after the first flag sees it; if all had come before, some may not have, so it
  // does not count.
  void TakeBack() {
    std::atomic<uint64_t>& state = group_.slot(group_.rank(), meeting_).state;
    state.fetch_or(HostGroup::kTakesBack);
    std::vector<bool> here(group_.size());
    state.fetch_or(CountHere(&here) < group_.size() ? HostGroup::kTaken : HostGroup::kTooLate);
    group_.Notify();
  }
  static bool Leaves(uint64_t state) { return (state & HostGroup::kLeave) != 0; }

  int CountHere(std::vector<bool>* here) const {
    for (int rank = 0; rank < group_.size(); ++rank) (*here)[rank] = IsHere(rank);
    return static_cast<int>(std::count(here->begin(), here->end(), true));
  }

  // The rank that leaves while others do not, and one of those; or false.
  bool FindLeaver(int* leaver, int* worker) const {
    *leaver = offer_.leaving ? group_.rank() : -1;
    *worker = offer_.leaving ? -1 : group_.rank();
    for (int rank = 0; rank < group_.size(); ++rank) {
      const uint64_t state = group_.slot(rank, meeting_).state.load();
      if (state >> HostGroup::kFlagBits != meeting_) continue;
      int& found = Leaves(state) ? *leaver : *worker;
      if (found < 0) found = rank;
    }
    return *leaver >= 0 && *worker >= 0;
  }

  Status LeftAlone() {
    int leaver = 0, worker = 0;
    (void)FindLeaver(&leaver, &worker);
    const Status reason(
        Code::kFailedPrecondition,
        Title() + ": " + Name(leaver) + " has already ended its script, but " + Name(worker) +
            " still runs this collective. Let all ranks do the same number of steps, and look for "
            "an early exit on " +
            Name(leaver) + ".");
    // Those who stay know what they were about to do.
    return offer_.leaving ? reason : group_.Break(reason, meeting_);
  }

  Status WaitAsleep() {
    std::vector<bool> here(group_.size()), before(group_.size());
    int arrived = CountHere(&here);
    Clock::time_point since = Clock::now();  // the last arrival
    WarningSchedule warnings(group_.timeout_s());
    bool taken_back = false;
    while (arrived < group_.size()) {
      if (!taken_back && offer_.IsWithdrawn()) {
        taken_back = true;
        TakeBack();
      }
      before = here;
      group_.Sleep(
          HostGroup::kAnyone, [&] { return CountHere(&here) > arrived; },
          std::min(kLookAroundS, group_.timeout_s() / 8));
      const int count = CountHere(&here);
      if (count > arrived) {
        arrived = count;
        since = Clock::now();
        warnings = WarningSchedule(group_.timeout_s());
      }
      int leaver = 0, worker = 0;
      if (FindLeaver(&leaver, &worker)) return LeftAlone();
      if (offer_.waiting) {
        const Status told = offer_.waiting(here);
        if (!told.ok()) return group_.Break(told, 0);
      }
      if (arrived == group_.size()) break;
      DDL_RETURN_IF_ERROR(group_.status());
      for (int rank = 0; rank < group_.size(); ++rank) {
        if (here[rank] || !group_.HasDied(rank)) continue;
        DDL_RETURN_IF_ERROR(
            GiveUp(Code::kAborted,
                   Name(rank) + " has ended without a word. See its log for the reason."));
      }
      if (!offer_.IsLimited()) {
        since = Clock::now();
        continue;
      }
      const double waited_s = std::chrono::duration<double>(Clock::now() - since).count();
      if (waited_s > group_.timeout_s()) {
        const std::string limit = Seconds(group_.timeout_s());
        DDL_RETURN_IF_ERROR(GiveUp(
            Code::kDeadlineExceeded,
            MissingOf(here) + " did not come within " + limit + "; " + Name(group_.rank()) +
                " waited longer than " + limit + " for " + MissingOf(here) +
                " and gave up. Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT "
                "if it needs so long."));
      } else if (warnings.Due(waited_s) && here.begin() + group_.rank() ==
                                               std::find(here.begin(), here.end(), true)) {
        LogLine(group_.name(group_.rank()),
                Title() + ": waiting for " + MissingOf(here) + " since " + Seconds(waited_s) +
                    " (limit " + Seconds(group_.timeout_s()) + ")");
      }
    }
    return Status();
  }

  // Ok if the missing ranks have come at the last moment after all.
  Status GiveUp(Code code, const std::string& why) {
    group_.slot(group_.rank(), meeting_).state.fetch_or(HostGroup::kDoubt);
    std::vector<bool> here(group_.size());
    // Whoever comes after this line sees the doubt; whoever came before it is seen here.
    if (CountHere(&here) == group_.size()) return Status();
    return group_.Break(Status(code, Title() + ": " + why), meeting_);
  }

  HostGroup& group_;
  const Offer& offer_;
  const int64_t nbytes_;
  const uint64_t meeting_;
  StoreChoice stores_;
  const bool tuned_;
  double seconds_ = 0;
};

}  // namespace

Status Meet(HostGroup* group, const Offer& offer, Met* met) {
  DDL_RETURN_IF_ERROR(group->status());
  Attendance attendance(group, offer);
  attendance.Show();
  bool withdrawn = false;
  DDL_RETURN_IF_ERROR(attendance.WaitForAll(&withdrawn));
  *met = withdrawn ? Met::kWithdrawn : attendance.Alike() ? Met::kAlike : Met::kDifferent;
  if (*met == Met::kAlike) attendance.AddUp();
  return Status();
}

}  // namespace ddl
