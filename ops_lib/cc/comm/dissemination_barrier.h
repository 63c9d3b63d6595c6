#ifndef DDL_COMM_DISSEMINATION_BARRIER_H_
#define DDL_COMM_DISSEMINATION_BARRIER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "algorithms/host_barrier.h"
#include "comm/messenger.h"
#include "core/stall.h"
#include "core/status.h"

namespace ddl {

// The barrier of algorithms/host_barrier.h between hosts: groups of ranks compare what they are
// about to do. The first rank of each group, its leader, acts for all of it.
//
// In step s of ceil(log2 G), leader g sends a summary of all that it knows to leader g + 2^s and
// receives one from g - 2^s (modulo G). It says whether all digests so far match, so it does no
// harm to count one twice. Source: Hensgen, Finkel and Manber, Two Algorithms for Barrier
// Synchronization, 1988.
//
// A rank that cancels its request tells every leader. One that has not arrived yet takes that into
// account before it sends anything, so either all leaders learn of it in time or none does.
//
// A long wait is the exception: only then do ranks tell the leaders who has arrived, so that a
// missing rank can be named. Whoever gives up tells every leader; the ranks cannot get back into
// step.
class DisseminationBarrier {
 public:
  // `groups`: the ranks of each, this rank in one of them. `messenger` must outlive this object.
  DisseminationBarrier(Messenger* messenger, std::vector<std::vector<int>> groups,
                       double timeout_s);

  bool is_leader() const { return groups_[own_][0] == messenger_->rank(); }

  // Every rank, before anything else of a barrier.
  void Begin();

  // The leader, when all of its group have arrived, with the result among them. Waits for the other
  // groups; the result is the same on all leaders. The errors are those of
  // algorithms/host_barrier.h, but a dead peer is one that does not arrive; and that of
  // `arrival.while_waiting`, which ends the wait of this leader alone.
  Status ArriveAndWait(const Arrival& arrival, BarrierResult within, BarrierResult* result);

  // Any rank that has waited for `waited_s` for ranks of its own group: the other leaders will name
  // `missing`. Costs a message to each of them when that changes, and none in a short wait.
  Status ReportMissing(const std::vector<int>& missing, double waited_s);

  // A rank that has waited for `waited_s` for its leader, which waits for the other groups: whether
  // its own wait is limited. Costs a message to the leader when that changes, and none in a short
  // wait.
  Status ReportLimit(bool limited, double waited_s);

  // Any rank, in a barrier: cancels the request of its group.
  Status Cancel();

  // The leader: takes in what messages have come. Returns why a rank has broken the group, or ok.
  Status Poll();

  // Breaks the barrier on all leaders for this reason, unless it is broken already.
  void Break(const Status& reason);

 private:
  using Clock = std::chrono::steady_clock;

  // What a leader knows of the groups that it has heard from, as it is sent.
  struct Summary {
    uint64_t number;  // of the barrier
    uint64_t digest[2];
    int32_t leaver, active;  // the first rank that leaves, and that does not; or -1
    bool mismatch, cancelled;
  };
  // Who has arrived of another group, at the barrier of that number.
  struct Presence {
    uint64_t number = 0;
    bool complete = false;
    std::vector<int> missing;  // if it is not
  };

  Status SendToOthers(const std::string& message);
  Status Await(int group, const Arrival& arrival, Summary* theirs);
  Status CheckStall(const Arrival& arrival, double waited_s);
  std::vector<bool> Arrived() const;
  bool IsLimited(const Arrival& arrival) const;
  Status LeaverError(const Arrival& arrival);

  Messenger* const messenger_;
  const std::vector<std::vector<int>> groups_;
  const double timeout_s_;
  const double report_after_s_;
  int own_ = 0;
  std::vector<int> group_of_;  // of each rank
  Status broken_;

  uint64_t number_ = 0;
  BarrierResult within_ = BarrierResult::kMatch;
  Summary summary_ = {};
  std::vector<std::deque<Summary>> inbox_;  // by group
  std::vector<Presence> presence_;          // by group
  std::vector<int> reported_missing_;
  bool reported_limit_ = true;
  int grace_polls_ = 0;             // after the limit
  std::vector<bool> limited_;       // of each rank of this group, as far as it has told its leader
  uint64_t cancelled_barrier_ = 0;  // the last barrier that a rank has cancelled
  bool announced_ = false;
  Clock::time_point began_;  // this barrier
  StallClock since_last_;    // arrival
  WarningSchedule warnings_;
};

}  // namespace ddl

#endif  // DDL_COMM_DISSEMINATION_BARRIER_H_
