#ifndef DDL_TRANSPORT_HOST_GROUP_H_
#define DDL_TRANSPORT_HOST_GROUP_H_

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "core/backoff.h"
#include "core/status.h"

namespace ddl {

// The shared memory of the ranks of one host: what they write for each other, and how they wait. It
// moves no tensor; algorithms/ does. One thread of each rank uses it, and destroys it.
//
// Every variable has one writer, but for the outcome of the group, and only ever grows: a reader
// that is late or early sees an old value, never a wrong one, and nothing is reset between
// collectives. Stores of variables release and loads acquire, so whoever sees one sees all that was
// written before it, on every processor.
//
// Waiting: a short spin, because peers of one training mostly arrive at the same time; then yields;
// then a futex, because the core belongs to the training and perhaps to the late peer itself. A
// rank that publishes something makes a system call only for those that sleep and wait for it.
//
// Liveness: each rank holds a robust mutex in the segment, which the kernel releases when its
// thread ends, however it ends. Only ranks that sleep check it, so it costs nothing otherwise.
class HostGroup {
 public:
  static constexpr int kAnyone = -1;
  static constexpr int64_t kLineBytes = 128;  // processors fetch cache lines in pairs
  static constexpr int kSlotsPerRank = 2;     // one is written while the other is read
  static constexpr int64_t kSlotBytes = int64_t{32} << 10;
  static constexpr int kBuffers = 6;  // pieces under way at once
  static constexpr int64_t kPieceBytes = int64_t{256} << 10;
  static constexpr int64_t kStateBytes = int64_t{8} << 10;

  // Where a rank arrives at a barrier: the digest of what it is about to do, and a small tensor.
  struct alignas(kLineBytes) Slot {
    std::atomic<uint64_t> state;  // number of the barrier << kFlagBits | flags, written last
    uint64_t digest[2];
    char payload[kSlotBytes - 24];  // begins in the state's line, so a few elements come with it
  };
  static constexpr uint64_t kSuspect = 1;  // this rank suspects that another one is lost
  static constexpr uint64_t kLeaving = 2;  // this rank's script has ended
  // This rank cancels its request, if not all have arrived yet; then one of the next two.
  static constexpr uint64_t kCancelling = 4;
  static constexpr uint64_t kCancelled = 8;
  static constexpr uint64_t kCancelTooLate = 16;
  static constexpr int kFlagBits = 5;

  // How far a rank is with the pieces of large tensors, counted from the beginning.
  struct alignas(kLineBytes) PieceCounters {
    std::atomic<int64_t> copied;    // its contributions lie ready
    std::atomic<int64_t> reduced;   // its share is summed
    std::atomic<int64_t> consumed;  // it has read all results
  };

  // What `size` ranks need, and its initial state: once, before anybody joins.
  static int64_t Nbytes(int size);
  static void Format(void* base, int size);

  // Joins. `base` outlives this object. `global_ranks` are the ranks of the job that these are, for
  // messages; empty: the same.
  HostGroup(void* base, int rank, int size, double timeout_s, std::vector<int> global_ranks = {});
  HostGroup(const HostGroup&) = delete;
  ~HostGroup();

  int rank() const { return rank_; }
  int size() const { return size_; }
  double timeout_s() const { return timeout_s_; }
  // The rank of the job that `rank` is.
  int global_rank(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[rank]; }

  Slot& slot(int rank, uint64_t barrier) {
    return slots_[rank * kSlotsPerRank + barrier % kSlotsPerRank];
  }
  PieceCounters& counters(int rank) { return counters_[rank]; }
  // Bytes that `rank` writes for the others; kPieceBytes of them.
  char* area(int rank, int64_t piece) {
    return areas_ + (piece % kBuffers * size_ + rank) * kPieceBytes;
  }

  // kStateBytes of `rank`, for what algorithms remember between collectives: zeros at first. Only
  // that rank writes there.
  char* state(int rank) { return states_ + rank * kStateBytes; }

  // The number of the next barrier, and of the first of `count` more pieces: the same on all ranks.
  uint64_t NextBarrier() { return ++barriers_; }
  int64_t NextPieces(int64_t count) {
    pieces_ += count;
    return pieces_ - count;
  }

  // Call after each change of slot or counters: wakes those who wait for this rank. After a store
  // that was not sequentially consistent it may miss one who falls asleep at that moment, until it
  // is called again after a fence.
  void Notify();
  // Others see what this rank has stored before it sees what they have: of two ranks that each
  // store, fence, and load what the other stores, at least one sees the other's. One of them may do
  // without the fence if its store and load are sequentially consistent, as in Sleep. C++ promises
  // that of a sequentially consistent fence, on every processor (C++20, [atomics.order] 4). On
  // x86-64 any locked instruction is one, also on a variable that nobody shares, and
  // ThreadSanitizer, which does not know the fence, knows that; on aarch64 it would not do.
  void Fence() {
#if defined(__x86_64__)
    fence_.fetch_add(1);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }

  // Waits until `ready()`, which depends on what `peer` publishes. Aborted if the peer has died,
  // DeadlineExceeded after the timeout, else why the group is broken; then it is for all ranks.
  template <typename Ready>
  Status Await(int peer, Ready ready) {
    return SpinUntil(ready) ? Status() : AwaitAsleep(peer, ready);
  }

  // The parts of it, for waits with rules of their own. `peer` may be kAnyone.
  template <typename Ready>
  bool SpinUntil(Ready ready) {
    for (int i = 0; i < kSpins; ++i) {
      if (ready()) return true;
      CpuRelax();
    }
    return YieldUntil(ready);
  }
  void Sleep(int peer, const std::function<bool()>& ready, double at_most_s);
  bool HasDied(int rank);

  // For a wait in which the others of this host can see nothing else of this rank: to be called at
  // each look. Whoever waits for it asks now and then whether `beats` has changed.
  void Beat() { liveness_[rank_].beats.store(beats(rank_) + 1, std::memory_order_relaxed); }
  uint32_t beats(int rank) const {
    return liveness_[rank].beats.load(std::memory_order_relaxed);
  }

  // The outcome of the group is one word, so that all ranks come to the same end whoever is faster:
  // either a barrier is complete or the group is broken, never both.
  //
  // This rank has seen all others at `barrier`: commits it. Returns false if the group was broken
  // before.
  bool Commit(uint64_t barrier);
  // Breaks the group for this reason unless it is broken already or `barrier` is committed; 0 for
  // none. Returns why the group is broken, or ok if it is not. Any thread of the rank may call it.
  Status Break(const Status& reason, uint64_t barrier);
  // Ok, or why it is broken.
  Status status() const;

 private:
  struct alignas(kLineBytes) Waiter {
    std::atomic<uint32_t> wakeups;  // the futex
    std::atomic<uint32_t> awaited;  // 0: awake; else whom this rank waits for
  };
  struct alignas(kLineBytes) Liveness {
    pthread_mutex_t held;
    std::atomic<uint32_t> joined;
    std::atomic<uint32_t> beats;
  };
  struct alignas(kLineBytes) Error {
    uint32_t code;
    uint32_t length;
    char text[1016];
  };
  // Committed: the number of the barrier. Broken: the top bit and the rank whose error says why.
  struct alignas(kLineBytes) Outcome {
    std::atomic<uint64_t> word;
  };
  static constexpr uint64_t kBroken = uint64_t{1} << 63;
  // Some 10 and 100 microseconds. Yields come soon: where ranks share a core, a spin only delays.
  static constexpr int kSpins = 300;
  static constexpr int kYields = 200;
  static constexpr uint32_t kAwaitsAnyone = ~uint32_t{0};

  struct Layout;

  template <typename Ready>
  bool YieldUntil(Ready ready) {
    for (int i = 0; i < kYields; ++i) {
      Yield();
      if (ready()) return true;
    }
    return false;
  }
  static void Yield();
  Status AwaitAsleep(int peer, const std::function<bool()>& ready);
  void Wake(int rank);

  const int rank_;
  const int size_;
  const double timeout_s_;
  const std::vector<int> global_ranks_;
#if defined(__x86_64__)
  std::atomic<uint32_t> fence_{0};
#endif
  std::mutex breaking_;
  uint64_t barriers_ = 0;
  int64_t pieces_ = 0;

  Outcome* outcome_;
  Waiter* waiters_;
  Liveness* liveness_;
  Error* errors_;
  PieceCounters* counters_;
  char* states_;
  Slot* slots_;
  char* areas_;
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_HOST_GROUP_H_
