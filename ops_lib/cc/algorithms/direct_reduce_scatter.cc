#include "algorithms/direct_reduce_scatter.h"

#include <algorithm>
#include <cstdint>

#include "core/vector.h"

namespace ddl {
namespace {

// Of the pieces of all other ranks together.
constexpr int64_t kPieceBytes = int64_t{2} << 20;
constexpr int64_t kMinPieceBytes = int64_t{64} << 10;
constexpr int64_t kUnit = 64;  // whole elements of every type
constexpr int64_t kBuffers = 2;  // one is added while the other is under way

class Scattering {
 public:
  Scattering(Transport* transport, const void* in, const std::vector<Range>& shares)
      : transport_(*transport),
        in_(static_cast<const char*>(in)),
        shares_(shares),
        others_(transport->size() - 1) {
    int64_t largest = 0;
    for (const Range& share : shares) largest = std::max(largest, share.count());
    const int64_t room = std::max(kPieceBytes / std::max(others_, 1), kMinPieceBytes);
    room_ = std::min((largest + kUnit - 1) / kUnit, room / kUnit) * kUnit;
    pieces_ = room_ == 0 ? 0 : (largest + room_ - 1) / room_;
    incoming_ = transport_.Scratch(kBuffers * room_ * others_);
  }

  Status Run(char* out, DType dtype, Reduction reduction) {
    const int rank = transport_.rank(), size = transport_.size();
    std::vector<const void*> sources(size);
    Sum sum;
    sum.sources = sources.data();
    sum.num_sources = size;
    sum.dtype = dtype;
    sum.op = reduction.op;
    sum.divisor = reduction.divisor;
    for (int64_t piece = 0; piece <= pieces_; ++piece) {
      if (piece < pieces_) DDL_RETURN_IF_ERROR(Begin(piece));
      if (piece == 0) continue;
      const Range own = Piece(rank, piece - 1);
      for (int step = 1; step < size; ++step) DDL_RETURN_IF_ERROR(transport_.AwaitReceive());
      if (own.count() == 0) continue;
      for (int step = 1; step < size; ++step) {
        sources[(rank + size - step) % size] = Incoming(piece - 1, step);
      }
      sources[rank] = in_ + own.begin;
      sum.out = out + (own.begin - shares_[rank].begin);
      sum.count = own.count() / static_cast<int64_t>(DTypeSize(dtype));
      Compute(sum);
    }
    return transport_.AwaitSends(0);
  }

 private:
  Range Piece(int rank, int64_t piece) const {
    const Range& share = shares_[rank];
    const int64_t begin = std::min(share.begin + piece * room_, share.end);
    return {begin, std::min(begin + room_, share.end)};
  }
  char* Incoming(int64_t piece, int step) const {
    return incoming_ + (piece % kBuffers * others_ + step - 1) * room_;
  }

  Status Begin(int64_t piece) {
    const int rank = transport_.rank(), size = transport_.size();
    for (int step = 1; step < size; ++step) {
      DDL_RETURN_IF_ERROR(transport_.Receive((rank + size - step) % size, Incoming(piece, step),
                                             Piece(rank, piece).count()));
    }
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      const Range theirs = Piece(peer, piece);
      DDL_RETURN_IF_ERROR(transport_.Send(peer, in_ + theirs.begin, theirs.count()));
    }
    return transport_.AwaitSends(kBuffers * others_);
  }

  Transport& transport_;
  const char* const in_;
  const std::vector<Range>& shares_;
  const int others_;
  int64_t room_ = 0, pieces_ = 0;
  char* incoming_ = nullptr;
};

}  // namespace

Status DirectReduceScatter(Transport* transport, const void* in, void* out,
                           const std::vector<Range>& shares, DType dtype, Reduction reduction) {
  return Scattering(transport, in, shares).Run(static_cast<char*>(out), dtype, reduction);
}

}  // namespace ddl
