#include "algorithms/host_barrier.h"

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

// One rank at one barrier.
class BarrierRound {
 public:
  BarrierRound(HostGroup* group, const Arrival& arrival)
      : group_(*group),
        arrival_(arrival),
        nbytes_(arrival.count * static_cast<int64_t>(DTypeSize(arrival.dtype))),
        number_(group->NextBarrier()),
        stores_(group),
        tuned_(nbytes_ >= kTunedBytes && stores_.chooses()) {}

  void Arrive() {
    HostGroup::Slot& mine = group_.slot(group_.rank(), number_);
    mine.digest[0] = arrival_.digest[0];
    mine.digest[1] = arrival_.digest[1];
    const Clock::time_point start = Start();
    if (nbytes_ >= kTunedBytes && stores_.UsesNonTemporal(StoreChoice::kSmallAllReduce, nbytes_)) {
      CopyBytes(mine.payload, arrival_.in, nbytes_, true);
      FenceNonTemporalStores();
    } else if (nbytes_ > 0) {
      std::memcpy(mine.payload, arrival_.in, nbytes_);
    }
    Stop(start);
    mine.state.store(number_ << HostGroup::kFlagBits |
                         (arrival_.leaving ? HostGroup::kLeaving : 0) |
                         (arrival_.cancels ? HostGroup::kCancelling | HostGroup::kCancelled : 0),
                     std::memory_order_release);
    group_.Notify();
  }

  // `cancelled`: whether a rank has cancelled its request.
  Status WaitForAll(bool* cancelled) {
    int next = 0;  // all before it have arrived
    const auto all_arrived = [this, &next] {
      while (next < group_.size() && HasArrived(next)) ++next;
      return next == group_.size();
    };
    const bool done = group_.SpinUntil(all_arrived);
    // Arrive has not waited until its stores are visible: that takes as long as those of the
    // others, so the two pass together. From here on they are, as the suspicions below need, and
    // this rank sees whoever fell asleep before.
    group_.Fence();
    group_.Notify();
    if (!done) DDL_RETURN_IF_ERROR(WaitAsleep());
    // Read again now that all have arrived: whoever gave up before the last arrival has set
    // kSuspect before it, so a rank that sees none here knows that there will be none. The same
    // holds for a rank that cancels; it says itself whether that was before the last arrival.
    bool suspected = false;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const uint64_t state = group_.slot(rank, number_).state.load();
      if (IsLeaving(state) != arrival_.leaving) return LeaverError();
      suspected = suspected || (state & HostGroup::kSuspect);
      if (state & HostGroup::kCancelling) {
        DDL_RETURN_IF_ERROR(AwaitCancelFlag(rank));
        const uint64_t answer = group_.slot(rank, number_).state.load();
        *cancelled = *cancelled || (answer & HostGroup::kCancelled);
      }
    }
    if (suspected && !group_.Commit(number_)) return group_.status();
    return Status();
  }

  bool DigestsMatch() {
    for (int rank = 0; rank < group_.size(); ++rank) {
      const HostGroup::Slot& slot = group_.slot(rank, number_);
      const bool match =
          slot.digest[0] == arrival_.digest[0] && slot.digest[1] == arrival_.digest[1];
      if (!match) return false;
    }
    return true;
  }

  void Reduce() {
    if (arrival_.count == 0) return;
    const Clock::time_point start = Start();
    const void* sources[kMaxRanks];
    std::vector<const void*> many;
    const void** list = sources;
    if (group_.size() > kMaxRanks) {
      many.resize(group_.size());
      list = many.data();
    }
    for (int rank = 0; rank < group_.size(); ++rank) {
      list[rank] = group_.slot(rank, number_).payload;
    }
    Sum sum;
    sum.sources = list;
    sum.num_sources = group_.size();
    sum.out = arrival_.out;
    sum.count = arrival_.count;
    sum.dtype = arrival_.dtype;
    sum.op = arrival_.reduction.op;
    sum.divisor = arrival_.reduction.divisor;
    Compute(sum);
    Stop(start);
    if (tuned_) stores_.Tune(StoreChoice::kSmallAllReduce, nbytes_, seconds_);
  }

 private:
  static constexpr int kMaxRanks = 64;  // without an allocation
  // Reading the clock would cost too much of smaller ones.
  static constexpr int64_t kTunedBytes = int64_t{8} << 10;

  // The wait for the others, between writing and reading, says nothing about the stores.
  Clock::time_point Start() const { return tuned_ ? Clock::now() : Clock::time_point(); }
  void Stop(Clock::time_point start) {
    if (tuned_) seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
  }

  std::string Title() const { return arrival_.title ? arrival_.title() : "A collective"; }

  std::string Name(int rank) const { return "rank " + std::to_string(group_.global_rank(rank)); }

  std::string Missing(const std::vector<bool>& arrived) const {
    std::string text;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!arrived[rank]) text += (text.empty() ? "" : ", ") + Name(rank);
    }
    return text;
  }

  bool HasArrived(int rank) const {
    return group_.slot(rank, number_).state.load() >> HostGroup::kFlagBits == number_;
  }

  // For a rank that cancels: it is about to say whether it did so in time.
  Status AwaitCancelFlag(int rank) {
    const std::atomic<uint64_t>& state = group_.slot(rank, number_).state;
    return group_.Await(rank, [&state] {
      return (state.load() & (HostGroup::kCancelled | HostGroup::kCancelTooLate)) != 0;
    });
  }

  // Whoever arrives after the first flag sees it; if all had arrived before, some may not have seen
  // it, so it does not count.
  void Cancel() {
    std::atomic<uint64_t>& state = group_.slot(group_.rank(), number_).state;
    state.fetch_or(HostGroup::kCancelling);
    std::vector<bool> arrived(group_.size());
    state.fetch_or(CountArrived(&arrived) < group_.size() ? HostGroup::kCancelled
                                                          : HostGroup::kCancelTooLate);
    group_.Notify();
  }
  static bool IsLeaving(uint64_t state) { return (state & HostGroup::kLeaving) != 0; }

  int CountArrived(std::vector<bool>* arrived) const {
    for (int rank = 0; rank < group_.size(); ++rank) (*arrived)[rank] = HasArrived(rank);
    return static_cast<int>(std::count(arrived->begin(), arrived->end(), true));
  }

  // The rank that leaves while others do not, and one of those; or false.
  bool FindLeaver(int* leaver, int* active) const {
    *leaver = arrival_.leaving ? group_.rank() : -1;
    *active = arrival_.leaving ? -1 : group_.rank();
    for (int rank = 0; rank < group_.size(); ++rank) {
      const uint64_t state = group_.slot(rank, number_).state.load();
      if (state >> HostGroup::kFlagBits != number_) continue;
      int& found = IsLeaving(state) ? *leaver : *active;
      if (found < 0) found = rank;
    }
    return *leaver >= 0 && *active >= 0;
  }

  Status LeaverError() {
    int leaver = 0, active = 0;
    (void)FindLeaver(&leaver, &active);
    const Status reason(
        Code::kFailedPrecondition,
        Title() + ": " + Name(leaver) + " has already ended its script, but " + Name(active) +
            " still runs this collective. Let all ranks do the same number of steps, and look for "
            "an early exit on " +
            Name(leaver) + ".");
    // Ranks that stay can name their collective.
    return arrival_.leaving ? reason : group_.Break(reason, number_);
  }

  Status WaitAsleep() {
    std::vector<bool> arrived(group_.size()), before(group_.size());
    int num_arrived = CountArrived(&arrived);
    StallClock since_last;  // the last arrival
    WarningSchedule warnings(group_.timeout_s());
    bool cancelled = false;
    while (num_arrived < group_.size()) {
      if (!cancelled && arrival_.IsCancelled()) {
        cancelled = true;
        Cancel();
      }
      before = arrived;
      group_.Sleep(
          HostGroup::kAnyone, [&] { return CountArrived(&arrived) > num_arrived; },
          std::min(kLivenessCheckS, group_.timeout_s() / 8));
      const int count = CountArrived(&arrived);
      if (count > num_arrived) {
        num_arrived = count;
        since_last.Restart();
        warnings = WarningSchedule(group_.timeout_s());
      }
      int leaver = 0, active = 0;
      if (FindLeaver(&leaver, &active)) return LeaverError();
      if (arrival_.while_waiting) {
        const Status status = arrival_.while_waiting(arrived);
        if (!status.ok()) return group_.Break(status, 0);
      }
      if (num_arrived == group_.size()) break;
      DDL_RETURN_IF_ERROR(group_.status());
      for (int rank = 0; rank < group_.size(); ++rank) {
        if (arrived[rank] || !group_.HasDied(rank)) continue;
        DDL_RETURN_IF_ERROR(Suspect(
            Code::kAborted,
            Name(rank) + " has ended without leaving the group. See its log for the reason."));
      }
      if (!arrival_.IsLimited()) {
        since_last.Restart();
        continue;
      }
      const double waited_s = since_last.Poll();
      if (waited_s > group_.timeout_s()) {
        const std::string limit = Seconds(group_.timeout_s());
        DDL_RETURN_IF_ERROR(Suspect(
            Code::kDeadlineExceeded,
            Missing(arrived) + " did not come within " + limit + "; " + Name(group_.rank()) +
                " waited longer than " + limit + " for " + Missing(arrived) +
                " and gave up. Look for what keeps it busy or blocked; raise DDL_STALL_TIMEOUT "
                "if it needs so long."));
      } else if (warnings.Due(waited_s) && arrived.begin() + group_.rank() ==
                                               std::find(arrived.begin(), arrived.end(), true)) {
        LogLine(group_.global_rank(group_.rank()),
                Title() + ": waited " + Seconds(waited_s) + " for " + Missing(arrived) +
                    " so far (limit " + Seconds(group_.timeout_s()) + ")");
      }
    }
    return Status();
  }

  // Ok if the missing ranks have arrived at the last moment after all.
  Status Suspect(Code code, const std::string& why) {
    group_.slot(group_.rank(), number_).state.fetch_or(HostGroup::kSuspect);
    std::vector<bool> arrived(group_.size());
    // Whoever arrives after this line sees kSuspect; whoever arrived before it is seen here.
    if (CountArrived(&arrived) == group_.size()) return Status();
    return group_.Break(Status(code, Title() + ": " + why), number_);
  }

  HostGroup& group_;
  const Arrival& arrival_;
  const int64_t nbytes_;
  const uint64_t number_;
  StoreChoice stores_;
  const bool tuned_;
  double seconds_ = 0;
};

}  // namespace

Status HostBarrier(HostGroup* group, const Arrival& arrival, BarrierResult* result) {
  DDL_RETURN_IF_ERROR(group->status());
  BarrierRound round(group, arrival);
  round.Arrive();
  bool cancelled = false;
  DDL_RETURN_IF_ERROR(round.WaitForAll(&cancelled));
  *result = cancelled              ? BarrierResult::kCancelled
            : round.DigestsMatch() ? BarrierResult::kMatch
                                   : BarrierResult::kMismatch;
  if (*result == BarrierResult::kMatch) round.Reduce();
  return Status();
}

}  // namespace ddl
