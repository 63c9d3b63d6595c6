#include "transport/host_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "core/stall.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// How often a sleeping rank looks whether the others are alive.
constexpr double kLookAround = 0.05;

constexpr int64_t kPage = 4096;

int64_t RoundUp(int64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

}  // namespace

// Offsets of the parts.
struct HostGroup::Layout {
  explicit Layout(int size)
      : choices(sizeof(FateWord)),
        bells(choices + sizeof(Choices)),
        lives(bells + size * sizeof(Bell)),
        notes(lives + size * sizeof(Life)),
        progress(notes + size * sizeof(Note)),
        slots(RoundUp(progress + size * sizeof(Progress))),
        areas(RoundUp(slots + size * kTurns * sizeof(Slot))),
        end(areas + kBuffers * size * kPieceBytes) {}

  int64_t choices, bells, lives, notes, progress, slots, areas, end;
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
    Life* life = reinterpret_cast<Life*>(memory + layout.lives) + rank;
    pthread_mutex_init(&life->held, &attributes);
  }
  pthread_mutexattr_destroy(&attributes);
}

HostGroup::HostGroup(void* base, int rank, int size, double timeout_s, std::vector<int> names)
    : rank_(rank), size_(size), timeout_s_(timeout_s), names_(std::move(names)) {
  const Layout layout(size);
  char* memory = static_cast<char*>(base);
  fate_ = reinterpret_cast<FateWord*>(memory);
  choices_ = reinterpret_cast<Choices*>(memory + layout.choices);
  bells_ = reinterpret_cast<Bell*>(memory + layout.bells);
  lives_ = reinterpret_cast<Life*>(memory + layout.lives);
  notes_ = reinterpret_cast<Note*>(memory + layout.notes);
  progress_ = reinterpret_cast<Progress*>(memory + layout.progress);
  slots_ = reinterpret_cast<Slot*>(memory + layout.slots);
  areas_ = memory + layout.areas;
  pthread_mutex_lock(&lives_[rank].held);
  lives_[rank].joined.store(1);
}

HostGroup::~HostGroup() { pthread_mutex_unlock(&lives_[rank_].held); }

int HostGroup::CaseOf(Kind kind, int64_t nbytes) {
  int range = 0;
  for (int64_t end = int64_t{64} << 10; nbytes >= end && range < kRanges - 1; end *= 4) ++range;
  return kind * kRanges + range;
}

bool HostGroup::StreamsAreas(Kind kind, int64_t nbytes) const {
  if (stores_ != Stores::kTuned) return stores_ == Stores::kStreamed;
  return choices_->word.load() >> CaseOf(kind, nbytes) & 1;
}

void HostGroup::Tune(Kind kind, int64_t nbytes, double seconds) {
  if (stores_ != Stores::kTuned) return;
  const int which = CaseOf(kind, nbytes);
  Tuner& tuner = tuners_[which];
  tuner.Ran(seconds / static_cast<double>(nbytes));
  // Told now, so that all know it when they begin the next one.
  const uint32_t bit = uint32_t{1} << which, before = choices_->word.load();
  const uint32_t now = tuner.way() == 1 ? before | bit : before & ~bit;
  if (now != before) choices_->word.store(now);
}

void HostGroup::Yield() { sched_yield(); }

void HostGroup::Wake(int rank) {
  std::atomic<uint32_t>& rings = bells_[rank].rings;
  rings.fetch_add(1);
  syscall(SYS_futex, &rings, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void HostGroup::Ring() {
  // Sequentially consistent with Sleep: either that rank sees what was published, or we see that it
  // sleeps.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const uint32_t awaited = bells_[peer].awaited.load();
    if (awaited == kAwaitsAnyone || awaited == static_cast<uint32_t>(rank_) + 1) Wake(peer);
  }
}

void HostGroup::Sleep(int peer, const std::function<bool()>& ready, double at_most_s) {
  Bell& bell = bells_[rank_];
  bell.awaited.store(peer == kAnyone ? kAwaitsAnyone : static_cast<uint32_t>(peer) + 1);
  const uint32_t rings = bell.rings.load();
  if (!ready()) {
    timespec limit;
    limit.tv_sec = static_cast<time_t>(at_most_s);
    limit.tv_nsec = static_cast<long>((at_most_s - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, &bell.rings, FUTEX_WAIT, rings, &limit, nullptr, 0);
  }
  bell.awaited.store(0);
}

bool HostGroup::HasDied(int rank) {
  if (lives_[rank].joined.load() == 0) return false;
  pthread_mutex_t* held = &lives_[rank].held;
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
  const Clock::time_point start = Clock::now();
  while (true) {
    Sleep(peer, ready, std::min(kLookAround, timeout_s_));
    if (ready()) return Status();
    DDL_RETURN_IF_ERROR(Fate());
    const std::string who = "rank " + std::to_string(names_.empty() ? peer : names_[peer]);
    if (HasDied(peer)) {
      // It may have published this just before.
      if (ready()) return Status();
      return Break(Status(Code::kAborted, who + " has ended in the middle of a collective. See its "
                                                "log for the reason."),
                   0);
    }
    const double waited_s = std::chrono::duration<double>(Clock::now() - start).count();
    if (waited_s > timeout_s_) {
      return Break(Status(Code::kDeadlineExceeded,
                          who + " stopped in the middle of a collective and did not go on within " +
                              Seconds(timeout_s_) + ". Look for what blocks it."),
                   0);
    }
  }
}

bool HostGroup::Settle(uint64_t meeting) {
  uint64_t now = fate_->word.load();
  // A later meeting means that this one was held.
  while (!(now & kBroken) && now < meeting) {
    if (fate_->word.compare_exchange_weak(now, meeting)) return true;
  }
  return !(now & kBroken);
}

Status HostGroup::Break(const Status& reason, uint64_t meeting) {
  Note& note = notes_[rank_];
  uint64_t now = fate_->word.load();
  if (now & kBroken) return Fate();
  note.code = static_cast<uint32_t>(reason.code());
  note.length = static_cast<uint32_t>(std::min(reason.message().size(), sizeof(note.text)));
  std::memcpy(note.text, reason.message().data(), note.length);
  while (!(now & kBroken)) {
    if (meeting > 0 && now >= meeting) return Status();
    if (fate_->word.compare_exchange_weak(now, kBroken | static_cast<uint64_t>(rank_))) {
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_ && bells_[peer].awaited.load() != 0) Wake(peer);
      }
      return reason;
    }
  }
  return Fate();
}

Status HostGroup::Fate() const {
  const uint64_t now = fate_->word.load();
  if (!(now & kBroken)) return Status();
  const Note& note = notes_[now & ~kBroken];
  return Status(static_cast<Code>(note.code), std::string(note.text, note.length));
}

}  // namespace ddl
