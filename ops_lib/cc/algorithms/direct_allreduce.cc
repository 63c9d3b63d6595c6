#include "algorithms/direct_allreduce.h"

#include <algorithm>
#include <vector>

#include "algorithms/range.h"
#include "core/vector.h"

namespace ddl {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

class Direct {
 public:
  Direct(Transport* transport, int64_t count, DType dtype, Reduction reduction)
      : transport_(*transport),
        element_(static_cast<int64_t>(DTypeSize(dtype))),
        dtype_(dtype),
        reduction_(reduction),
        // This rank's share of each of the others; every share has room for the longest.
        room_((std::min(count, Piece()) / transport->size() + 1) * element_),
        incoming_(transport_.Scratch(room_ * (transport->size() - 1))) {}

  int64_t Piece() const { return kPieceBytes / element_; }

  Status Run(const char* in, char* out, int64_t count) {
    const int rank = transport_.rank(), size = transport_.size();
    const Range own = Bytes(count, rank);
    std::vector<const void*> sources(size);
    sources[rank] = in + own.begin;
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + size - step) % size;
      char* to = incoming_ + room_ * (step - 1);
      sources[peer] = to;
      DDL_RETURN_IF_ERROR(transport_.Receive(peer, to, own.count()));
    }
    for (int step = 1; step < size; ++step) {
      const Range theirs = Bytes(count, (rank + step) % size);
      DDL_RETURN_IF_ERROR(
          transport_.Send((rank + step) % size, in + theirs.begin, theirs.count()));
    }
    for (int step = 1; step < size; ++step) DDL_RETURN_IF_ERROR(transport_.AwaitReceive());
    // `out` may be `in`.
    DDL_RETURN_IF_ERROR(transport_.AwaitSends(0));

    Sum sum;
    sum.sources = sources.data();
    sum.num_sources = size;
    sum.out = out + own.begin;
    sum.count = own.count() / element_;
    sum.dtype = dtype_;
    sum.op = reduction_.op;
    sum.divisor = reduction_.divisor;
    Compute(sum);

    for (int step = 1; step < size; ++step) {
      const int peer = (rank + size - step) % size;
      const Range theirs = Bytes(count, peer);
      DDL_RETURN_IF_ERROR(transport_.Receive(peer, out + theirs.begin, theirs.count()));
    }
    for (int step = 1; step < size; ++step) {
      DDL_RETURN_IF_ERROR(transport_.Send((rank + step) % size, out + own.begin, own.count()));
    }
    for (int step = 1; step < size; ++step) DDL_RETURN_IF_ERROR(transport_.AwaitReceive());
    return transport_.AwaitSends(0);
  }

 private:
  Range Bytes(int64_t count, int rank) const {
    const Range elements = EqualPart(count, transport_.size(), rank);
    return {elements.begin * element_, elements.end * element_};
  }

  Transport& transport_;
  const int64_t element_;
  const DType dtype_;
  const Reduction reduction_;
  const int64_t room_;
  char* const incoming_;
};

}  // namespace

Status DirectAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                       Reduction reduction) {
  Direct direct(transport, count, dtype, reduction);
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  for (int64_t first = 0; first < count; first += direct.Piece()) {
    DDL_RETURN_IF_ERROR(direct.Run(static_cast<const char*>(in) + first * element,
                                   static_cast<char*>(out) + first * element,
                                   std::min(direct.Piece(), count - first)));
  }
  return Status();
}

}  // namespace ddl
