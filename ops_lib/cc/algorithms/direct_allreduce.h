#ifndef DDL_ALGORITHMS_DIRECT_ALLREDUCE_H_
#define DDL_ALGORITHMS_DIRECT_ALLREDUCE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/reduction.h"
#include "transport/transport.h"

namespace ddl {

// out[i] = `reduction` over ranks of in[i], the same bits on every rank and in every
// run. `in` may equal `out`. dtypes: see core/vector.
//
// Each rank gets its share, 1/N, of every rank's values, adds the shares up in the order of the
// ranks, and hands the sum to all. So halves, which are added in float32, travel as halves and are
// rounded once: no step passes on a sum that others add to.
//
// 2 steps, in which each rank sends to all others at once; 2 (N - 1) / N * S of S bytes, as a ring.
// Large tensors go in pieces, which bounds what lies ready to be added.
Status DirectAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                       Reduction reduction);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_DIRECT_ALLREDUCE_H_
