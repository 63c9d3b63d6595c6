#ifndef DDL_ALGORITHMS_DIRECT_REDUCE_SCATTER_H_
#define DDL_ALGORITHMS_DIRECT_REDUCE_SCATTER_H_

#include <vector>

#include "algorithms/range.h"
#include "core/dtype.h"
#include "core/reduction.h"
#include "transport/transport.h"

namespace ddl {

// `out` gets this rank's share of `reduction` over ranks of `in`, the same bits in every run.
// `shares` are bytes of `in`, whole elements, one range for each rank and perhaps empty; the same on
// every rank. `out` must not overlap `in`. dtypes: see core/vector.
//
// Each rank gets its share of every rank's values and adds them up in the order of the ranks, so
// halves, which are added in float32, travel as halves and are rounded once.
//
// One step, in which each rank sends to all others at once: of S bytes (N - 1) / N * S, as a ring,
// in which N - 1 steps follow each other. Large shares go in pieces, which bounds what lies ready to
// be added; while one is added, the next is under way.
Status DirectReduceScatter(Transport* transport, const void* in, void* out,
                           const std::vector<Range>& shares, DType dtype, Reduction reduction);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_DIRECT_REDUCE_SCATTER_H_
