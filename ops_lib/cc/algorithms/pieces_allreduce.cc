#include "algorithms/pieces_allreduce.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/vector.h"

namespace ddl {
namespace {

// Shares begin at lines, so that no two ranks write the same one.
constexpr int64_t kShareUnit = 64;
// Smaller tensors are still cut in two, so that their steps overlap.
constexpr int64_t kMinPieceBytes = int64_t{64} << 10;
constexpr int64_t kCuts = 2;
// From here on the output would only push other things out of the caches. Measured: past them costs
// a fifth at 4 MiB, gains nothing at 16 MiB and a tenth at 64 MiB.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct Range {
  int64_t begin, end;
  int64_t nbytes() const { return end - begin; }
};

// A piece is copied in while the two before it are reduced and copied out.
static_assert(HostGroup::kBuffers >= 3);

class PiecesAllReduce {
 public:
  PiecesAllReduce(HostGroup* group, const void* in, void* out, int64_t count, DType dtype,
                  int divisor)
      : group_(*group),
        in_(static_cast<const char*>(in)),
        out_(static_cast<char*>(out)),
        nbytes_(count * static_cast<int64_t>(DTypeSize(dtype))),
        dtype_(dtype),
        divisor_(divisor),
        piece_nbytes_(std::clamp(RoundUp(nbytes_ / kCuts, kShareUnit), kMinPieceBytes,
                                 HostGroup::kPieceBytes)),
        num_pieces_((nbytes_ + piece_nbytes_ - 1) / piece_nbytes_),
        first_(group->NextPieces(num_pieces_)),
        stream_(in != out && nbytes_ >= kStreamBytes),
        sources_(group->size()) {}

  Status Run() {
    for (int64_t step = 0; step < num_pieces_ + 2; ++step) {
      if (step < num_pieces_) DDL_RETURN_IF_ERROR(CopyIn(step));
      if (step >= 1 && step <= num_pieces_) DDL_RETURN_IF_ERROR(Reduce(step - 1));
      if (step >= 2) DDL_RETURN_IF_ERROR(CopyOut(step - 2));
    }
    if (stream_) FinishStreams();
    return Status();
  }

 private:
  using Counter = std::atomic<int64_t> HostGroup::Progress::*;

  // Bytes of the tensor in a piece, and of a piece in a share.
  Range Piece(int64_t piece) const {
    return {piece * piece_nbytes_, std::min(nbytes_, (piece + 1) * piece_nbytes_)};
  }
  Range Share(int64_t piece, int rank) const {
    const int64_t nbytes = Piece(piece).nbytes();
    const int64_t share = RoundUp((nbytes + group_.size() - 1) / group_.size(), kShareUnit);
    return {std::min(nbytes, rank * share), std::min(nbytes, (rank + 1) * share)};
  }

  Status AwaitPeer(int peer, Counter counter, int64_t count) {
    std::atomic<int64_t>& value = group_.progress(peer).*counter;
    return group_.Await(peer, [&value, count] { return value.load() >= count; });
  }

  void Publish(Counter counter, int64_t piece) {
    (group_.progress(group_.rank()).*counter).store(first_ + piece + 1);
    group_.Ring();
  }

  Status CopyIn(int64_t piece) {
    // The buffer is free when all have taken what it held before.
    const int64_t free = first_ + piece + 1 - HostGroup::kBuffers;
    for (int peer = 0; peer < group_.size(); ++peer) {
      DDL_RETURN_IF_ERROR(AwaitPeer(peer, &HostGroup::Progress::taken, free));
    }
    const char* from = in_ + Piece(piece).begin;
    char* to = group_.area(group_.rank(), first_ + piece);
    const Range own = Share(piece, group_.rank());
    if (own.begin > 0) std::memcpy(to, from, own.begin);
    if (const int64_t rest = Piece(piece).nbytes() - own.end; rest > 0) {
      std::memcpy(to + own.end, from + own.end, rest);
    }
    Publish(&HostGroup::Progress::copied, piece);
    return Status();
  }

  Status Reduce(int64_t piece) {
    const Range own = Share(piece, group_.rank());
    const int64_t at = Piece(piece).begin + own.begin;
    for (int peer = 0; peer < group_.size(); ++peer) {
      DDL_RETURN_IF_ERROR(AwaitPeer(peer, &HostGroup::Progress::copied, first_ + piece + 1));
      sources_[peer] = peer == group_.rank() ? in_ + at
                                             : group_.area(peer, first_ + piece) + own.begin;
    }
    Sum sum;
    sum.sources = sources_.data();
    sum.num_sources = group_.size();
    sum.out = out_ + at;
    sum.copy = group_.area(group_.rank(), first_ + piece) + own.begin;
    sum.count = own.nbytes() / static_cast<int64_t>(DTypeSize(dtype_));
    sum.dtype = dtype_;
    sum.divisor = divisor_;
    sum.stream = stream_;
    Compute(sum);
    Publish(&HostGroup::Progress::reduced, piece);
    return Status();
  }

  Status CopyOut(int64_t piece) {
    for (int step = 1; step < group_.size(); ++step) {
      const int peer = (group_.rank() + step) % group_.size();
      DDL_RETURN_IF_ERROR(AwaitPeer(peer, &HostGroup::Progress::reduced, first_ + piece + 1));
      const Range share = Share(piece, peer);
      CopyBytes(out_ + Piece(piece).begin + share.begin,
                group_.area(peer, first_ + piece) + share.begin, share.nbytes(), stream_);
    }
    Publish(&HostGroup::Progress::taken, piece);
    return Status();
  }

  HostGroup& group_;
  const char* in_;
  char* out_;
  const int64_t nbytes_;
  const DType dtype_;
  const int divisor_;
  const int64_t piece_nbytes_;
  const int64_t num_pieces_;
  const int64_t first_;
  const bool stream_;
  std::vector<const void*> sources_;
};

}  // namespace

Status AllReduceInPieces(HostGroup* group, const void* in, void* out, int64_t count, DType dtype,
                         int divisor) {
  DDL_RETURN_IF_ERROR(group->Fate());
  return PiecesAllReduce(group, in, out, count, dtype, divisor).Run();
}

}  // namespace ddl
