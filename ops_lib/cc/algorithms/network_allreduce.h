#ifndef DDL_ALGORITHMS_NETWORK_ALLREDUCE_H_
#define DDL_ALGORITHMS_NETWORK_ALLREDUCE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/reduction.h"
#include "transport/transport.h"

namespace ddl {

// out[i] = `reduction` over ranks of in[i], by the algorithm that is fastest for so
// many ranks and bytes: recursive doubling, halving and doubling, or a ring; halves directly, so
// that they are rounded once, and averages of integers, so that no part of their sum wraps around
// on its way. The choice is the same on all ranks. See there for the bits and bytes.
// `whole`: elements of the tensor of which this is a fragment, which has the algorithm of the whole.
Status NetworkAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                        Reduction reduction, int64_t whole);
inline Status NetworkAllReduce(Transport* transport, const void* in, void* out, int64_t count,
                               DType dtype, Reduction reduction) {
  return NetworkAllReduce(transport, in, out, count, dtype, reduction, count);
}

}  // namespace ddl

#endif  // DDL_ALGORITHMS_NETWORK_ALLREDUCE_H_
