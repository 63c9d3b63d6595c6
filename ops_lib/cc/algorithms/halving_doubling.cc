#include "algorithms/halving_doubling.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "algorithms/range.h"
#include "core/vector.h"

namespace ddl {
namespace {

// Bounds what lies ready to be added, of large tensors.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

class HalvingDoubling {
 public:
  HalvingDoubling(Transport* transport, int64_t count, DType dtype, Reduction reduction)
      : transport_(*transport),
        element_(static_cast<int64_t>(DTypeSize(dtype))),
        dtype_(dtype),
        reduction_(reduction),
        incoming_(transport_.Scratch(std::min(count, Piece()) * element_)) {
    while (2 * power_ <= transport->size()) power_ *= 2;
    extra_ = transport->size() - power_;
    const int rank = transport->rank();
    paired_ = rank < 2 * extra_;
    virtual_rank_ = paired_ ? rank / 2 : rank - extra_;
  }

  int64_t Piece() const { return kPieceBytes / element_; }

  Status Run(const char* in, char* out, int64_t count, bool halve) {
    if (transport_.size() == 1) {
      Add(in, nullptr, out, count, reduction_.divisor);
      return Status();
    }
    const int rank = transport_.rank();
    const int64_t nbytes = count * element_;
    if (paired_ && rank % 2 == 0) {
      DDL_RETURN_IF_ERROR(transport_.Send(rank + 1, in, nbytes));
      // `out` may be `in`.
      DDL_RETURN_IF_ERROR(transport_.AwaitSends(0));
      DDL_RETURN_IF_ERROR(transport_.Receive(rank + 1, out, nbytes));
      return transport_.AwaitReceive();
    }
    const char* mine = in;
    if (paired_) {
      DDL_RETURN_IF_ERROR(transport_.Receive(rank - 1, incoming_, nbytes));
      DDL_RETURN_IF_ERROR(transport_.AwaitReceive());
      Add(incoming_, in, out, count, 1);
      mine = out;
    }
    DDL_RETURN_IF_ERROR(halve ? HalveAndDouble(mine, out, count) : Double(mine, out, count));
    if (!paired_) return Status();
    DDL_RETURN_IF_ERROR(transport_.Send(rank - 1, out, nbytes));
    return transport_.AwaitSends(0);
  }

 private:
  // The rank that a virtual one stands for: those are the P that take part, counted through.
  int RankOf(int virtual_rank) const {
    return virtual_rank < extra_ ? 2 * virtual_rank + 1 : virtual_rank + extra_;
  }

  void Add(const void* first, const void* second, void* out, int64_t count, int divisor) {
    const void* sources[] = {first, second};
    Sum sum;
    sum.sources = sources;
    sum.num_sources = second == nullptr ? 1 : 2;
    sum.out = out;
    sum.count = count;
    sum.dtype = dtype_;
    sum.op = reduction_.op;
    sum.divisor = divisor;
    Compute(sum);
  }

  // The partner's part has arrived; the lower rank's goes first.
  void AddIncoming(const char* mine, char* out, int64_t count, int distance, int divisor) {
    const void* first = mine;
    const void* second = incoming_;
    if (virtual_rank_ & distance) std::swap(first, second);
    Add(first, second, out, count, divisor);
  }

  Status Double(const char* mine, char* out, int64_t count) {
    const int64_t nbytes = count * element_;
    for (int distance = 1; distance < power_; distance *= 2) {
      const int partner = RankOf(virtual_rank_ ^ distance);
      DDL_RETURN_IF_ERROR(
          transport_.Exchange(partner, mine, nbytes, partner, incoming_, nbytes));
      AddIncoming(mine, out, count, distance, 2 * distance == power_ ? reduction_.divisor : 1);
      mine = out;
    }
    return Status();
  }

  Status HalveAndDouble(const char* mine, char* out, int64_t count) {
    Range kept{0, count};
    std::vector<std::pair<int, Range>> handed;  // to whom, and what
    for (int distance = power_ / 2; distance >= 1; distance /= 2) {
      const int partner = RankOf(virtual_rank_ ^ distance);
      const int64_t middle = kept.begin + kept.count() / 2;
      Range given{middle, kept.end};
      kept.end = middle;
      if (virtual_rank_ & distance) std::swap(kept, given);
      DDL_RETURN_IF_ERROR(transport_.Exchange(partner, mine + given.begin * element_,
                                              given.count() * element_, partner, incoming_,
                                              kept.count() * element_));
      AddIncoming(mine + kept.begin * element_, out + kept.begin * element_, kept.count(), distance,
                  distance == 1 ? reduction_.divisor : 1);
      mine = out;
      handed.emplace_back(partner, given);
    }
    for (; !handed.empty(); handed.pop_back()) {
      const auto& [partner, given] = handed.back();
      DDL_RETURN_IF_ERROR(transport_.Exchange(partner, out + kept.begin * element_,
                                              kept.count() * element_, partner,
                                              out + given.begin * element_,
                                              given.count() * element_));
      kept = {std::min(kept.begin, given.begin), std::max(kept.end, given.end)};
    }
    return Status();
  }

  Transport& transport_;
  const int64_t element_;
  const DType dtype_;
  const Reduction reduction_;
  char* const incoming_;
  int power_ = 1, extra_ = 0, virtual_rank_ = 0;
  bool paired_ = false;
};

Status Run(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
           Reduction reduction, bool halve) {
  HalvingDoubling algorithm(transport, count, dtype, reduction);
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  for (int64_t first = 0; first < count; first += algorithm.Piece()) {
    DDL_RETURN_IF_ERROR(algorithm.Run(static_cast<const char*>(in) + first * element,
                                      static_cast<char*>(out) + first * element,
                                      std::min(algorithm.Piece(), count - first), halve));
  }
  return Status();
}

}  // namespace

Status HalvingDoublingAllReduce(Transport* transport, const void* in, void* out, int64_t count,
                                DType dtype, Reduction reduction) {
  return Run(transport, in, out, count, dtype, reduction, true);
}

Status DoublingAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                         Reduction reduction) {
  return Run(transport, in, out, count, dtype, reduction, false);
}

}  // namespace ddl
