#include "transport/host_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "core/stall.h"

namespace ddl {
namespace {

constexpr int64_t kPage = 4096;

int64_t RoundUp(int64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

}  // namespace

// Offsets of the parts.
struct HostGroup::Layout {
  explicit Layout(int size)
      : waiters(sizeof(Outcome)),
        liveness(waiters + size * sizeof(Waiter)),
        errors(liveness + size * sizeof(Liveness)),
        counters(errors + size * sizeof(Error)),
        states(RoundUp(counters + size * sizeof(PieceCounters))),
        slots(states + size * kStateBytes),
        areas(RoundUp(slots + size * kSlotsPerRank * sizeof(Slot))),
        end(areas + kBuffers * size * kPieceBytes) {}

  int64_t waiters, liveness, errors, counters, states, slots, areas, end;
};

int64_t HostGroup::Nbytes(int size) { return Layout(size).end; }

void HostGroup::Format(void* base, int size) {
  const Layout layout(size);
  char* memory = static_cast<char*>(base);
  std::memset(memory, 0, layout.areas);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  for (int rank = 0; rank < size; ++rank) {
    Liveness* liveness = reinterpret_cast<Liveness*>(memory + layout.liveness) + rank;
    pthread_mutex_init(&liveness->held, &attributes);
  }
  pthread_mutexattr_destroy(&attributes);
}

HostGroup::HostGroup(void* base, int rank, int size, double timeout_s,
                     std::vector<int> global_ranks)
    : rank_(rank), size_(size), timeout_s_(timeout_s), global_ranks_(std::move(global_ranks)) {
  const Layout layout(size);
  char* memory = static_cast<char*>(base);
  outcome_ = reinterpret_cast<Outcome*>(memory);
  waiters_ = reinterpret_cast<Waiter*>(memory + layout.waiters);
  liveness_ = reinterpret_cast<Liveness*>(memory + layout.liveness);
  errors_ = reinterpret_cast<Error*>(memory + layout.errors);
  counters_ = reinterpret_cast<PieceCounters*>(memory + layout.counters);
  states_ = memory + layout.states;
  slots_ = reinterpret_cast<Slot*>(memory + layout.slots);
  areas_ = memory + layout.areas;
  pthread_mutex_lock(&liveness_[rank].held);
  liveness_[rank].joined.store(1);
}

HostGroup::~HostGroup() { pthread_mutex_unlock(&liveness_[rank_].held); }

void HostGroup::Yield() { sched_yield(); }

void HostGroup::Wake(int rank) {
  std::atomic<uint32_t>& wakeups = waiters_[rank].wakeups;
  wakeups.fetch_add(1);
  syscall(SYS_futex, &wakeups, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void HostGroup::Notify() {
  // Sequentially consistent with Sleep: either that rank sees what was published, or we see that it
  // sleeps.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const uint32_t awaited = waiters_[peer].awaited.load();
    if (awaited == kAwaitsAnyone || awaited == static_cast<uint32_t>(rank_) + 1) Wake(peer);
  }
}

void HostGroup::Sleep(int peer, const std::function<bool()>& ready, double at_most_s) {
  Waiter& waiter = waiters_[rank_];
  waiter.awaited.store(peer == kAnyone ? kAwaitsAnyone : static_cast<uint32_t>(peer) + 1);
  const uint32_t wakeups = waiter.wakeups.load();
  if (!ready()) {
    timespec limit;
    limit.tv_sec = static_cast<time_t>(at_most_s);
    limit.tv_nsec = static_cast<long>((at_most_s - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, &waiter.wakeups, FUTEX_WAIT, wakeups, &limit, nullptr, 0);
  }
  waiter.awaited.store(0);
}

bool HostGroup::HasDied(int rank) {
  if (liveness_[rank].joined.load() == 0) return false;
  pthread_mutex_t* held = &liveness_[rank].held;
  switch (pthread_mutex_trylock(held)) {
    case EBUSY: return false;
    case 0:           // it has left in good order, which a rank that waits for it did not expect
    case EOWNERDEAD:  // not made consistent, so the next one to look gets ENOTRECOVERABLE
      pthread_mutex_unlock(held);
      return true;
    default: return true;
  }
}

Status HostGroup::AwaitAsleep(int peer, const std::function<bool()>& ready) {
  StallClock clock;
  while (true) {
    Sleep(peer, ready, std::min(kLivenessCheckS, timeout_s_));
    if (ready()) return Status();
    DDL_RETURN_IF_ERROR(status());
    const std::string who = "rank " + std::to_string(global_rank(peer));
    if (HasDied(peer)) {
      // It may have published this just before.
      if (ready()) return Status();
      return Break(Status(Code::kAborted, who + " has ended in the middle of a collective. See its "
                                                "log for the reason."),
                   0);
    }
    if (clock.Poll() > timeout_s_) {
      return Break(Status(Code::kDeadlineExceeded,
                          who + " stopped in the middle of a collective and did not go on within " +
                              Seconds(timeout_s_) + ". Look for what blocks it."),
                   0);
    }
  }
}

bool HostGroup::Commit(uint64_t barrier) {
  uint64_t now = outcome_->word.load();
  // A later barrier means that this one is complete.
  while (!(now & kBroken) && now < barrier) {
    if (outcome_->word.compare_exchange_weak(now, barrier)) return true;
  }
  return !(now & kBroken);
}

Status HostGroup::Break(const Status& reason, uint64_t barrier) {
  const std::lock_guard<std::mutex> lock(breaking_);  // one of this rank writes its error
  Error& error = errors_[rank_];
  uint64_t now = outcome_->word.load();
  if (now & kBroken) return status();
  error.code = static_cast<uint32_t>(reason.code());
  error.length = static_cast<uint32_t>(std::min(reason.message().size(), sizeof(error.text)));
  std::memcpy(error.text, reason.message().data(), error.length);
  while (!(now & kBroken)) {
    if (barrier > 0 && now >= barrier) return Status();
    if (outcome_->word.compare_exchange_weak(now, kBroken | static_cast<uint64_t>(rank_))) {
      for (int rank = 0; rank < size_; ++rank) {
        if (waiters_[rank].awaited.load() != 0) Wake(rank);
      }
      return reason;
    }
  }
  return status();
}

Status HostGroup::status() const {
  const uint64_t now = outcome_->word.load();
  if (!(now & kBroken)) return Status();
  const Error& error = errors_[now & ~kBroken];
  return Status(static_cast<Code>(error.code), std::string(error.text, error.length));
}

}  // namespace ddl
