#include "algorithms/all_to_all.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "algorithms/store_choice.h"
#include "core/vector.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// As in algorithms/pieces.cc: blocks begin at lines, and small ones are still cut in two.
constexpr int64_t kUnit = 64;
constexpr int64_t kMinPieceBytes = int64_t{64} << 10;
constexpr int64_t kCuts = 2;
// A piece is read in the same loop in which the second one after it is written.
constexpr int64_t kLag = 2;
static_assert(HostGroup::kBuffers > kLag);

// What a rank sends to all others at most in a round of messages, two of which are under way: each
// ends within the limit for a peer that stands still, also where the link is slow.
constexpr int64_t kRoundBytes = int64_t{64} << 20;
constexpr int64_t kRoundsUnderWay = 2;

int64_t RoundUp(int64_t value) { return (value + kUnit - 1) / kUnit * kUnit; }

}  // namespace

Exchange::Exchange(int rank, int size, std::vector<int64_t> nbytes)
    : rank_(rank), size_(size), nbytes_(std::move(nbytes)) {
  int64_t in = 0, out = 0;
  for (int peer = 0; peer < size; ++peer) {
    sent_.push_back({in, in + this->nbytes(rank, peer)});
    received_.push_back({out, out + this->nbytes(peer, rank)});
    in = sent_.back().end;
    out = received_.back().end;
  }
}

std::vector<Range> Exchange::SentTo(const std::vector<int>& ranks) const {
  std::vector<Range> ranges;
  for (const int rank : ranks) ranges.push_back(sent_[rank]);
  return ranges;
}

std::vector<Range> Exchange::ReceivedFrom(const std::vector<int>& ranks) const {
  std::vector<Range> ranges;
  for (const int rank : ranks) ranges.push_back(received_[rank]);
  return ranges;
}

int64_t Exchange::Largest(const std::vector<int>& ranks) const {
  int64_t largest = 0;
  for (const int from : ranks) {
    for (const int to : ranks) {
      if (from != to) largest = std::max(largest, nbytes(from, to));
    }
  }
  return largest;
}

Exchange Exchange::BetweenHosts(const std::vector<int>& hosts) const {
  Exchange rest = *this;
  for (int from = 0; from < size_; ++from) {
    if (hosts[from] == hosts[rank_]) rest.sent_[from] = rest.received_[from] = {};
    for (int to = 0; to < size_; ++to) {
      if (hosts[from] == hosts[to]) rest.nbytes_[from * size_ + to] = 0;
    }
  }
  return rest;
}

void KeepOwnBlock(const void* in, void* out, const Range& sent, const Range& received) {
  const bool non_temporal = sent.count() >= kNonTemporalMoveBytes / 2;
  CopyBytes(static_cast<char*>(out) + received.begin, static_cast<const char*>(in) + sent.begin,
            sent.count(), non_temporal);
  if (non_temporal) FenceNonTemporalStores();
}

Status AllToAllInPieces(HostGroup* group, const void* in, void* out, const std::vector<Range>& sent,
                        const std::vector<Range>& received, int64_t largest) {
  DDL_RETURN_IF_ERROR(group->status());
  const int rank = group->rank(), size = group->size();
  KeepOwnBlock(in, out, sent[rank], received[rank]);
  if (largest == 0) return Status();
  const int64_t block =
      std::clamp(RoundUp((largest + kCuts - 1) / kCuts), RoundUp(kMinPieceBytes / size),
                 HostGroup::kPieceBytes / size / kUnit * kUnit);
  const int64_t pieces = (largest + block - 1) / block;
  const int64_t first = group->NextPieces(pieces);
  StoreChoice stores(group);
  const bool non_temporal = stores.UsesNonTemporal(StoreChoice::kAllToAll, largest * size);
  const Clock::time_point start = Clock::now();
  // Of a whole block, what a piece holds.
  const auto part = [block](const Range& whole, int64_t piece) {
    const int64_t begin = std::min(whole.begin + piece * block, whole.end);
    return Range{begin, std::min(begin + block, whole.end)};
  };
  const auto await = [&](int peer, std::atomic<int64_t> HostGroup::PieceCounters::*counter,
                         int64_t count) {
    const std::atomic<int64_t>& value = group->counters(peer).*counter;
    return group->Await(peer, [&value, count] { return value.load() >= count; });
  };
  const auto publish = [&](std::atomic<int64_t> HostGroup::PieceCounters::*counter, int64_t piece) {
    (group->counters(rank).*counter).store(first + piece + 1);
    group->Notify();
  };
  const bool past_caches = TotalSize(received) >= kNonTemporalMoveBytes;
  for (int64_t step = 0; step < pieces + kLag; ++step) {
    const int64_t earlier = step - kLag;
    const bool writes = step < pieces, reads = earlier >= 0;
    for (int peer = 0; writes && peer < size; ++peer) {  // all have read what this area held before
      DDL_RETURN_IF_ERROR(await(peer, &HostGroup::PieceCounters::consumed,
                                first + step + 1 - HostGroup::kBuffers));
    }
    for (int distance = 1; distance < size; ++distance) {
      const int peer = (rank + distance) % size;
      Copy to_area, from_area;
      if (writes) {
        const Range range = part(sent[peer], step);
        to_area = {group->area(rank, first + step) + peer * block,
                   static_cast<const char*>(in) + range.begin, range.count(), non_temporal};
      }
      if (reads) {
        const Range range = part(received[peer], earlier);
        if (range.count() > 0) {
          DDL_RETURN_IF_ERROR(await(peer, &HostGroup::PieceCounters::copied, first + earlier + 1));
        }
        from_area = {static_cast<char*>(out) + range.begin,
                     group->area(peer, first + earlier) + rank * block, range.count(), past_caches};
      }
      CopyBoth(to_area, from_area);
    }
    if (writes) {
      if (non_temporal) FenceNonTemporalStores();
      publish(&HostGroup::PieceCounters::copied, step);
    }
    if (reads) publish(&HostGroup::PieceCounters::consumed, earlier);
  }
  if (past_caches) FenceNonTemporalStores();
  if (stores.chooses()) {
    stores.Tune(StoreChoice::kAllToAll, largest * size,
                std::chrono::duration<double>(Clock::now() - start).count());
  }
  return Status();
}

Status AllToAllByMessages(Transport* transport, const void* in, void* out,
                          const std::vector<Range>& sent, const std::vector<Range>& received,
                          int64_t largest) {
  const int rank = transport->rank(), size = transport->size(), peers = size - 1;
  if (peers == 0) return Status();
  const int64_t segment = std::max<int64_t>(kRoundBytes / peers, 1);
  const int64_t rounds = (largest + segment - 1) / segment;
  static constexpr char kNothingLeft = 0;
  char* const ignored = transport->Scratch(kRoundsUnderWay * size);
  const auto part = [segment](const Range& whole, int64_t round) {
    const int64_t begin = std::min(whole.begin + round * segment, whole.end);
    return Range{begin, std::min(begin + segment, whole.end)};
  };
  int64_t begun = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    for (; begun < std::min(rounds, round + kRoundsUnderWay); ++begun) {
      for (int distance = 1; distance < size; ++distance) {
        const int peer = (rank + size - distance) % size;
        const Range range = part(received[peer], begun);
        const bool nothing = rounds > 1 && range.count() == 0;
        char* const to = nothing ? ignored + begun % kRoundsUnderWay * size + peer
                                 : static_cast<char*>(out) + range.begin;
        DDL_RETURN_IF_ERROR(transport->Receive(peer, to, nothing ? 1 : range.count()));
      }
      for (int distance = 1; distance < size; ++distance) {
        const int peer = (rank + distance) % size;
        const Range range = part(sent[peer], begun);
        const bool nothing = rounds > 1 && range.count() == 0;
        const char* const from =
            nothing ? &kNothingLeft : static_cast<const char*>(in) + range.begin;
        DDL_RETURN_IF_ERROR(transport->Send(peer, from, nothing ? 1 : range.count()));
      }
    }
    for (int distance = 1; distance < size; ++distance) {
      DDL_RETURN_IF_ERROR(transport->AwaitReceive());
    }
    DDL_RETURN_IF_ERROR(transport->AwaitSends((begun - round - 1) * peers));
  }
  return Status();
}

}  // namespace ddl
