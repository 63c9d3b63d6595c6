#include "algorithms/network_allreduce.h"

#include "algorithms/direct_allreduce.h"
#include "algorithms/halving_doubling.h"
#include "algorithms/ring.h"
#include "core/half.h"

namespace ddl {
namespace {

// Measured, see benchmarks/collectives/README.md.
constexpr int64_t kDoublingBytes = int64_t{32} << 10;
constexpr int64_t kRingBytes = int64_t{8} << 20;

}  // namespace

Status NetworkAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                        Reduction reduction, int64_t whole) {
  const int64_t nbytes = whole * static_cast<int64_t>(DTypeSize(dtype));
  if (IsHalf(dtype) || SumsWide(dtype, reduction)) {
    return DirectAllReduce(transport, in, out, count, dtype, reduction);
  }
  if (nbytes < kDoublingBytes) {
    return DoublingAllReduce(transport, in, out, count, dtype, reduction);
  }
  if (nbytes < kRingBytes) {
    return HalvingDoublingAllReduce(transport, in, out, count, dtype, reduction);
  }
  return RingAllReduce(transport, in, out, count, dtype, reduction);
}

}  // namespace ddl
