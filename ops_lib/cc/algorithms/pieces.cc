#include "algorithms/pieces.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "algorithms/store_choice.h"
#include "algorithms/tensor_list.h"
#include "core/vector.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// Blocks begin at lines, so that no two ranks write the same one.
constexpr int64_t kUnit = 64;
// Smaller tensors are still cut in two, so that their steps overlap.
constexpr int64_t kMinPieceBytes = int64_t{64} << 10;
constexpr int64_t kCuts = 2;
// From here on the output would only push other things out of the caches. Measured: to write sums
// past them costs a fifth at 4 MiB, gains nothing at 16 MiB and a tenth at 64 MiB.
constexpr int64_t kNonTemporalSumBytes = int64_t{16} << 20;

// The stores are measured each time that so many pieces have been moved: within a tensor, because a
// virtual core may be moved at any time. With fewer, one late piece would decide.
constexpr int64_t kMeasuredPieces = 16;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t Largest(const std::vector<Range>& shares) {
  int64_t nbytes = 0;
  for (const Range& range : shares) nbytes = std::max(nbytes, range.count());
  return nbytes;
}

// A piece is scattered while the two before it are reduced and collected.
static_assert(HostGroup::kBuffers >= 3);

// The shares of tensors, and their way through the areas.
class Pieces {
 public:
  // `shares`: of each rank, in the sequence of `tensors`. In a piece lie `blocks` blocks: one for
  // each rank, or only the writer's own. `non_temporal`: whether outputs are written past the
  // caches, but for those that were just read.
  Pieces(HostGroup* group, StoreChoice::Kind kind, const TensorList& tensors,
         std::vector<Range> shares, int blocks, bool non_temporal)
      : group_(*group),
        stores_(group),
        kind_(kind),
        tensors_(tensors),
        rank_(group->rank()),
        shares_(std::move(shares)),
        nbytes_(TotalSize(shares_)),
        largest_(Largest(shares_)),
        blocks_(blocks),
        block_nbytes_(std::clamp(RoundUp((largest_ + kCuts - 1) / kCuts, kUnit),
                                 RoundUp(kMinPieceBytes / blocks, kUnit),
                                 HostGroup::kPieceBytes / blocks / kUnit * kUnit)),
        num_pieces_((largest_ + block_nbytes_ - 1) / block_nbytes_),
        first_(group->NextPieces(num_pieces_)),
        non_temporal_(non_temporal) {}

  Status AllReduce(DType dtype, Reduction reduction) {
    const Sum sum = Prepare(dtype, reduction);
    for (int64_t step = 0; step < num_pieces_ + 2; ++step) {
      ChooseStores(step);
      DDL_RETURN_IF_ERROR(ScatterAndCollect(step, step - 2));
      if (step < 1 || step > num_pieces_) continue;
      DDL_RETURN_IF_ERROR(Reduce(step - 1, sum, nullptr, /*for_others=*/true));
      PublishArea(&HostGroup::PieceCounters::reduced, step - 1);
    }
    Finish();
    return Status();
  }

  // `own_out`: null where each tensor gets its part.
  Status ReduceScatter(char* own_out, DType dtype, Reduction reduction) {
    const Sum sum = Prepare(dtype, reduction);
    for (int64_t step = 0; step < num_pieces_ + 1; ++step) {
      ChooseStores(step);
      if (step < num_pieces_) DDL_RETURN_IF_ERROR(Scatter(step));
      if (step < 1) continue;
      DDL_RETURN_IF_ERROR(Reduce(step - 1, sum, own_out, /*for_others=*/false));
      Publish(&HostGroup::PieceCounters::consumed, step - 1);
    }
    Finish();
    return Status();
  }

  Status AllGather(const char* own_in) {
    for (int64_t step = 0; step < num_pieces_ + 1; ++step) {
      ChooseStores(step);
      if (step < num_pieces_) DDL_RETURN_IF_ERROR(CopyIn(step, own_in));
      if (step >= 1) DDL_RETURN_IF_ERROR(Collect(step - 1));
    }
    Finish();
    return Status();
  }

 private:
  using Counter = std::atomic<int64_t> HostGroup::PieceCounters::*;

  // How areas are written in this step: as the last rank says, after what the steps before cost it.
  void ChooseStores(int64_t step) {
    if (step == 0 || step == measured_ + kMeasuredPieces) Measure(step);
    non_temporal_areas_ = stores_.UsesNonTemporal(kind_, nbytes_);
  }

  void Measure(int64_t step) {
    if (!stores_.chooses()) return;
    const Clock::time_point now = Clock::now();
    if (step > measured_) {
      const double seconds = std::chrono::duration<double>(now - since_).count();
      stores_.Tune(kind_, nbytes_, seconds * num_pieces_ / (step - measured_));
    }
    measured_ = step;
    since_ = now;
  }

  void Finish() {
    if (non_temporal_) FenceNonTemporalStores();
    if (measured_ == 0) Measure(num_pieces_);  // too short for more
  }

  // Where in its share a piece's block begins, and how long it is.
  int64_t At(int64_t piece) const { return piece * block_nbytes_; }
  int64_t Nbytes(int64_t piece, int rank) const {
    return std::clamp(shares_[rank].count() - At(piece), int64_t{0}, block_nbytes_);
  }
  // Where `rank` writes its block of its own share for the others.
  char* Area(int rank, int64_t piece) const { return Area(rank, piece, rank); }
  // Where `writer` writes its block of the share of `rank`.
  char* Area(int writer, int64_t piece, int rank) const {
    return group_.area(writer, first_ + piece) + (blocks_ > 1 ? rank * block_nbytes_ : 0);
  }

  Status AwaitPeer(int peer, Counter counter, int64_t count) {
    std::atomic<int64_t>& value = group_.counters(peer).*counter;
    return group_.Await(peer, [&value, count] { return value.load() >= count; });
  }

  // This rank's area is free when all have read what it held before.
  Status AwaitArea(int64_t piece) {
    for (int peer = 0; peer < group_.size(); ++peer) {
      DDL_RETURN_IF_ERROR(AwaitPeer(peer, &HostGroup::PieceCounters::consumed,
                                    first_ + piece + 1 - HostGroup::kBuffers));
    }
    return Status();
  }

  void Publish(Counter counter, int64_t piece) {
    (group_.counters(rank_).*counter).store(first_ + piece + 1);
    group_.Notify();
  }

  // After the rank has written its area.
  void PublishArea(Counter counter, int64_t piece) {
    if (non_temporal_areas_) FenceNonTemporalStores();
    Publish(counter, piece);
  }

  Sum Prepare(DType dtype, Reduction reduction) {
    sources_.resize(group_.size());
    Sum sum;
    sum.sources = sources_.data();
    sum.num_sources = group_.size();
    sum.dtype = dtype;
    sum.op = reduction.op;
    sum.divisor = reduction.divisor;
    sum.prefetch = rank_;  // the others' are in the caches
    return sum;
  }

  // function(in, out, at, n) for each stretch of a tensor in the block of `rank`'s share.
  template <typename Function>
  void ForEach(int64_t piece, int rank, Function function) const {
    tensors_.ForEach(shares_[rank].begin + At(piece), Nbytes(piece, rank), function);
  }

  void AppendScatter(int64_t piece, int rank) {
    char* const area = Area(rank_, piece, rank);
    ForEach(piece, rank, [&](const char* in, char*, int64_t at, int64_t n) {
      copies_in_.push_back({area + at, in, n, non_temporal_areas_});
    });
  }

  void AppendCollect(int64_t piece, int rank) {
    const char* const area = Area(rank, piece);
    ForEach(piece, rank, [&](const char* in, char* out, int64_t at, int64_t n) {
      copies_out_.push_back({out, area + at, n, non_temporal_ && in != out});
    });
  }

  // Does and forgets what was appended: pairs of one in and one out in one loop, as long as there
  // are both.
  void CopyAll() {
    size_t ins = 0, outs = 0;
    while (ins < copies_in_.size() && outs < copies_out_.size()) {
      Copy& in = copies_in_[ins];
      Copy& out = copies_out_[outs];
      // The longer one goes on at a cache line, so that its stores can still be non-temporal.
      int64_t both = std::min(in.nbytes, out.nbytes);
      if (in.nbytes != out.nbytes) both = both / kUnit * kUnit;
      CopyBoth(Front(in, both), Front(out, both));
      Advance(&in, both);
      Advance(&out, both);
      if (in.nbytes < kUnit) CopyRest(copies_in_[ins++]);
      if (out.nbytes < kUnit) CopyRest(copies_out_[outs++]);
    }
    for (; ins < copies_in_.size(); ++ins) CopyRest(copies_in_[ins]);
    for (; outs < copies_out_.size(); ++outs) CopyRest(copies_out_[outs]);
    copies_in_.clear();
    copies_out_.clear();
  }
  static Copy Front(const Copy& copy, int64_t nbytes) {
    return {copy.out, copy.in, nbytes, copy.non_temporal};
  }
  static void Advance(Copy* copy, int64_t nbytes) {
    copy->out = static_cast<char*>(copy->out) + nbytes;
    copy->in = static_cast<const char*>(copy->in) + nbytes;
    copy->nbytes -= nbytes;
  }
  static void CopyRest(const Copy& copy) {
    CopyBytes(copy.out, copy.in, copy.nbytes, copy.non_temporal);
  }

  // Scatters one piece and collects an earlier one, together: the first waits for memory to read,
  // the second to write. At the beginning there is none to collect, at the end none to scatter.
  Status ScatterAndCollect(int64_t piece, int64_t earlier) {
    if (earlier < 0) return piece < num_pieces_ ? Scatter(piece) : Status();
    if (piece >= num_pieces_) return Collect(earlier);
    DDL_RETURN_IF_ERROR(AwaitArea(piece));
    for (int step = 1; step < group_.size(); ++step) {
      const int peer = (rank_ + step) % group_.size();
      DDL_RETURN_IF_ERROR(
          AwaitPeer(peer, &HostGroup::PieceCounters::reduced, first_ + earlier + 1));
      AppendScatter(piece, peer);
      AppendCollect(earlier, peer);
      CopyAll();
    }
    PublishArea(&HostGroup::PieceCounters::copied, piece);
    Publish(&HostGroup::PieceCounters::consumed, earlier);
    return Status();
  }

  Status Scatter(int64_t piece) {
    DDL_RETURN_IF_ERROR(AwaitArea(piece));
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank != rank_) AppendScatter(piece, rank);
    }
    CopyAll();
    PublishArea(&HostGroup::PieceCounters::copied, piece);
    return Status();
  }

  // Writes this rank's block of the sum to where it goes in `own_out`, the whole of its share, or if
  // that is null to the tensors; and to its area if it is `for_others` too.
  Status Reduce(int64_t piece, Sum sum, char* own_out, bool for_others) {
    if (Nbytes(piece, rank_) == 0) return Status();
    for (int peer = 0; peer < group_.size(); ++peer) {
      DDL_RETURN_IF_ERROR(AwaitPeer(peer, &HostGroup::PieceCounters::copied, first_ + piece + 1));
    }
    sum.non_temporal_copy = non_temporal_areas_;
    int64_t end = 0;
    ForEach(piece, rank_, [&](const char* in, char* out, int64_t at, int64_t n) {
      if (own_out != nullptr) std::memset(own_out + At(piece) + end, 0, at - end);
      end = at + n;
      for (int peer = 0; peer < group_.size(); ++peer) {
        sources_[peer] = peer == rank_ ? in : Area(peer, piece, rank_) + at;
      }
      sum.out = own_out == nullptr ? out : own_out + At(piece) + at;
      sum.copy = for_others ? Area(rank_, piece) + at : nullptr;
      sum.non_temporal = non_temporal_ && own_out == nullptr && in != out;
      sum.count = n / static_cast<int64_t>(DTypeSize(sum.dtype));
      Compute(sum);
    });
    if (own_out != nullptr) {
      std::memset(own_out + At(piece) + end, 0, Nbytes(piece, rank_) - end);
    }
    return Status();
  }

  Status CopyIn(int64_t piece, const char* own_in) {
    if (Nbytes(piece, rank_) == 0) return Status();  // then nobody waits for it
    DDL_RETURN_IF_ERROR(AwaitArea(piece));
    char* const area = Area(rank_, piece);
    ForEach(piece, rank_, [&](const char* in, char* out, int64_t at, int64_t n) {
      const char* const from = own_in == nullptr ? in : own_in + At(piece) + at;
      if (from == out) {
        CopyBytes(area + at, from, n, non_temporal_areas_);
      } else {
        CopyBoth({area + at, from, n, non_temporal_areas_}, {out, from, n, non_temporal_});
      }
    });
    PublishArea(&HostGroup::PieceCounters::reduced, piece);
    return Status();
  }

  Status Collect(int64_t piece) {
    for (int step = 1; step < group_.size(); ++step) {
      const int peer = (rank_ + step) % group_.size();
      if (Nbytes(piece, peer) == 0) continue;
      DDL_RETURN_IF_ERROR(AwaitPeer(peer, &HostGroup::PieceCounters::reduced, first_ + piece + 1));
      AppendCollect(piece, peer);
      CopyAll();
    }
    Publish(&HostGroup::PieceCounters::consumed, piece);
    return Status();
  }

  HostGroup& group_;
  StoreChoice stores_;
  const StoreChoice::Kind kind_;
  const TensorList& tensors_;
  const int rank_;
  const std::vector<Range> shares_;
  const int64_t nbytes_;  // of all
  const int64_t largest_;
  const int blocks_;
  const int64_t block_nbytes_;
  const int64_t num_pieces_;
  const int64_t first_;
  const bool non_temporal_;
  bool non_temporal_areas_ = false;
  int64_t measured_ = 0;  // step of the last measurement
  Clock::time_point since_;
  std::vector<const void*> sources_;
  std::vector<Copy> copies_in_, copies_out_;  // into the areas, and out of them
};

Status Gather(HostGroup* group, StoreChoice::Kind kind, const TensorList& tensors,
              const std::vector<Range>& shares, const void* in) {
  DDL_RETURN_IF_ERROR(group->status());
  if (TotalSize(shares) == 0) return Status();
  return Pieces(group, kind, tensors, shares, 1, tensors.nbytes() >= kNonTemporalMoveBytes)
      .AllGather(static_cast<const char*>(in));
}

}  // namespace

Status AllReduceInPieces(HostGroup* group, const TensorList& tensors, Range part, DType dtype,
                         Reduction reduction) {
  DDL_RETURN_IF_ERROR(group->status());
  if (part.count() == 0) return Status();
  return Pieces(group, StoreChoice::kAllReduce, tensors, SplitAtCacheLines(part, group->size()),
                group->size(), tensors.nbytes() >= kNonTemporalSumBytes)
      .AllReduce(dtype, reduction);
}

Status AllReduceInPieces(HostGroup* group, const std::vector<TensorSpan>& tensors, DType dtype,
                         Reduction reduction) {
  const TensorList list(tensors, static_cast<int64_t>(DTypeSize(dtype)));
  return AllReduceInPieces(group, list, {0, list.nbytes()}, dtype, reduction);
}

Status AllReduceInPieces(HostGroup* group, const void* in, void* out, int64_t count, DType dtype,
                         Reduction reduction) {
  return AllReduceInPieces(group, {{in, out, count}}, dtype, reduction);
}

Status ReduceScatterInPieces(HostGroup* group, const TensorList& tensors,
                             const std::vector<Range>& shares, void* out, DType dtype,
                             Reduction reduction) {
  DDL_RETURN_IF_ERROR(group->status());
  if (TotalSize(shares) == 0) return Status();
  return Pieces(group, StoreChoice::kReduceScatter, tensors, shares, group->size(),
                tensors.nbytes() >= kNonTemporalSumBytes)
      .ReduceScatter(static_cast<char*>(out), dtype, reduction);
}

Status ReduceScatterInPieces(HostGroup* group, const TensorList& tensors,
                             const std::vector<Range>& shares, DType dtype, Reduction reduction) {
  return ReduceScatterInPieces(group, tensors, shares, nullptr, dtype, reduction);
}

Status AllGatherInPieces(HostGroup* group, const TensorList& tensors,
                         const std::vector<Range>& shares, const void* in) {
  return Gather(group, StoreChoice::kAllGather, tensors, shares, in);
}

Status AllGatherInPieces(HostGroup* group, const void* in, void* out,
                         const std::vector<int64_t>& nbytes) {
  const std::vector<Range> shares = ConsecutiveRanges(nbytes);
  return AllGatherInPieces(group, TensorList({{nullptr, out, shares.back().end}}, 1), shares, in);
}

Status BroadcastInPieces(HostGroup* group, void* buffer, int64_t nbytes, Range part, int root) {
  std::vector<Range> shares(group->size());
  shares[root] = part;
  return Gather(group, StoreChoice::kBroadcast, TensorList({{nullptr, buffer, nbytes}}, 1), shares,
                static_cast<char*>(buffer) + part.begin);
}

Status BroadcastInPieces(HostGroup* group, void* buffer, int64_t nbytes, int root) {
  return BroadcastInPieces(group, buffer, nbytes, {0, nbytes}, root);
}

}  // namespace ddl
