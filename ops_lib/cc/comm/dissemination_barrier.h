#ifndef DDL_COMM_DISSEMINATION_BARRIER_H_
#define DDL_COMM_DISSEMINATION_BARRIER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "algorithms/meeting.h"
#include "comm/messenger.h"
#include "core/stall.h"
#include "core/status.h"

namespace ddl {

// What algorithms/meeting.h does within a host, between hosts: groups of ranks compare what they are
// about to do. The first rank of each group, its leader, speaks for all of it.
//
// In step s of ceil(log2 G), leader g sends all that it knows to leader g + 2^s and hears as much
// from g - 2^s (modulo G). What it knows is whether all digests that it has heard of are equal, so it
// does no harm to hear of one twice. Source: Hensgen, Finkel and Manber, Two Algorithms for Barrier
// Synchronization, 1988.
//
// A rank that takes back what it has shown tells every leader. One that is still to come takes that
// into account before it sends anything, so either all leaders hear of it in time or none does.
//
// A wait of more than a moment is the exception: only then do ranks tell the leaders who is there, so
// that a missing rank can be named. Whoever gives up tells every leader; nobody can be in step again.
class DisseminationBarrier {
 public:
  // `groups`: the ranks of each, this rank in one of them. `messenger` must outlive this object.
  DisseminationBarrier(Messenger* messenger, std::vector<std::vector<int>> groups,
                       double timeout_s);

  bool leads() const { return groups_[own_][0] == messenger_->rank(); }

  // Every rank, before anything else of a barrier.
  void Begin();

  // The leader, when all of its group have come: on what they have come to. Waits for the other
  // groups; the outcome is the same on all leaders. The errors are those of algorithms/meeting.h, but a
  // dead peer is one that does not come; and that of `offer.waiting`, which ends the wait of this leader
  // alone.
  Status Meet(const Offer& offer, Met within, Met* met);

  // Any rank that has waited for `waited_s` for ranks of its own group: the other leaders will name
  // `missing`. Costs a message to each of them when that changes, and none in the first moment.
  Status Report(const std::vector<int>& missing, double waited_s);

  // A rank that has waited for `waited_s` for its leader, who waits for the other groups: whether its
  // own wait is limited. Costs a message to the leader when that changes, and none in the first
  // moment.
  Status ReportLimit(bool limited, double waited_s);

  // Any rank, in a barrier: takes back what its group has shown.
  Status TakeBack();

  // The leader: why somebody has given up, or ok. Looks for messages.
  Status Heard();

  // The leaders of the other groups shall give up for this reason, unless there has been another.
  void Break(const Status& reason);

 private:
  using Clock = std::chrono::steady_clock;

  // What a leader knows of the groups that it has heard of, as it travels.
  struct Knowledge {
    uint64_t number;  // of the barrier
    uint64_t digest[2];
    int32_t leaver, worker;  // the first rank that leaves, and that does not; or -1
    bool different, withdrawn;
  };
  // What is known of another group at the barrier of that number.
  struct Presence {
    uint64_t number = 0;
    bool complete = false;
    std::vector<int> missing;  // if it is not
  };

  Status SendToOthers(const std::string& message);
  Status Await(int group, const Offer& offer, Knowledge* theirs);
  Status LookAround(const Offer& offer);
  std::vector<bool> Arrived() const;
  bool IsLimited(const Offer& offer) const;
  Status LeftAlone(const Offer& offer);

  Messenger* const messenger_;
  const std::vector<std::vector<int>> groups_;
  const double timeout_s_;
  const double moment_s_;
  int own_ = 0;
  std::vector<int> group_of_;  // of each rank
  Status broken_;

  uint64_t number_ = 0;
  Met within_ = Met::kAlike;
  Knowledge known_ = {};
  std::vector<std::deque<Knowledge>> inbox_;  // by group
  std::vector<Presence> presence_;            // by group
  std::vector<int> reported_;
  bool reported_limit_ = true;
  int late_polls_ = 0;  // after the limit
  std::vector<bool> limited_;  // of each rank of this group, as far as it has told its leader
  uint64_t taken_back_ = 0;  // the last barrier that somebody has taken back
  bool announced_ = false;
  Clock::time_point began_, since_;  // this barrier; the last arrival
  WarningSchedule warnings_;
};

}  // namespace ddl

#endif  // DDL_COMM_DISSEMINATION_BARRIER_H_
