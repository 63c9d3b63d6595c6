#ifndef DDL_ALGORITHMS_RING_H_
#define DDL_ALGORITHMS_RING_H_

#include <cstdint>
#include <vector>

#include "algorithms/range.h"
#include "core/dtype.h"
#include "core/reduction.h"
#include "transport/transport.h"

namespace ddl {

// Each rank sends to the next and receives from the one before it, and all links are busy all the
// time. What travels is cut into chunks, one for each rank, and these into segments: while one
// segment is added, the next ones are under way.

// out[i] = `reduction` over ranks of in[i], the same bits on every rank and in every
// run. `in` may equal `out`. dtypes: see core/vector.
//
// N - 1 steps reduce: in step s rank r receives chunk r - s - 1 as summed so far, adds its own and
// sends it on in the next step; the last one to add divides. N - 1 more steps pass the sums round,
// straight into `out`. So chunk c is added up in the order of the ranks from c + 1 on, and one rank
// computes it for all.
//
// 2 (N - 1) steps; each rank sends 2 (N - 1) / N * S of S bytes, which is the least there can be.
// Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
// 2009.
Status RingAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                     Reduction reduction);

// Joins the bytes of all ranks in `out`: those of rank r lie at ranges[r], which is the same on
// every rank. Each contributes from its `in`, which may be its own range of `out`.
//
// N - 1 steps; each rank sends all but the next one's bytes, once.
Status RingAllGather(Transport* transport, const void* in, void* out, std::vector<Range> ranges);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_RING_H_
