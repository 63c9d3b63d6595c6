#ifndef DDL_ALGORITHMS_STORE_CHOICE_H_
#define DDL_ALGORITHMS_STORE_CHOICE_H_

#include <atomic>
#include <cstdint>

#include "core/tuner.h"
#include "transport/host_group.h"

namespace ddl {

// How ranks of a host write what others read: through the caches, or past them by non-temporal
// stores. Where two cores share a cache, the first is faster; where a line that one has just
// written comes slowly to the other, the second is, by far. Virtual cores are moved about, so each
// kind of collective, by size, is measured as it runs, large ones part by part, and the last rank
// chooses for all: not rank 0, which in a broadcast only writes.
//
// What the bits are and who waits for what do not depend on it: any choice is right, whoever sees
// it when. It lives in the group's memory (HostGroup::state), and this is a view of it.
class StoreChoice {
 public:
  enum Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSmallAllReduce, kAllToAll };
  enum class Stores : uint32_t { kTuned, kCached, kNonTemporal };

  explicit StoreChoice(HostGroup* group)
      : own_(StateOf(group, group->rank())),
        last_(StateOf(group, group->size() - 1)),
        chooses_(group->rank() == group->size() - 1) {}

  // Whether this rank writes past the caches in a collective of so many bytes.
  bool UsesNonTemporal(Kind kind, int64_t nbytes) const;

  // Whether this rank chooses for all.
  bool chooses() const { return chooses_; }

  // On the rank that chooses: what a collective took that was written as Streams says, or would
  // have taken at the pace of a part of it.
  void Tune(Kind kind, int64_t nbytes, double seconds);

  // This rank writes so from now on, for tests.
  void Use(Stores stores) { own_.stores = stores; }

 private:
  static constexpr int kKinds = 6;
  static constexpr int kRanges = 8;  // each reaches to four times as many bytes

  // Of one rank; all zeros at first. Others read `non_temporal` alone.
  struct State {
    alignas(HostGroup::kLineBytes) std::atomic<uint64_t> non_temporal;  // a bit for each case
    alignas(HostGroup::kLineBytes) Stores stores;
    Tuner tuners[kKinds * kRanges];
  };
  static_assert(sizeof(State) <= HostGroup::kStateBytes);

  static State& StateOf(HostGroup* group, int rank) {
    return *reinterpret_cast<State*>(group->state(rank));
  }
  static int CaseOf(Kind kind, int64_t nbytes);

  State& own_;
  State& last_;
  const bool chooses_;
};

}  // namespace ddl

#endif  // DDL_ALGORITHMS_STORE_CHOICE_H_
