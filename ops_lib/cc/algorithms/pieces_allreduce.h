#ifndef DDL_ALGORITHMS_PIECES_ALLREDUCE_H_
#define DDL_ALGORITHMS_PIECES_ALLREDUCE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"
#include "transport/host_group.h"

namespace ddl {

// out[i] = sum over ranks of in[i], divided by `divisor`, the same bits on every rank: additions
// are in rank order. `in` may equal `out`. dtype: see CanSum.
//
// The tensor goes through shared memory in pieces that stay in the caches, and each rank reduces
// its share, 1/N, of each piece:
//   copy in    what the others need of the rank's own input: all but its share
//   reduce     its share, from its own input and the others' copies, into its output and, for the
//              others, into shared memory
//   copy out   the shares that the others have reduced
// Each step of a piece is followed by another piece's, so that a rank seldom waits: while piece k
// is copied in, k - 1 is reduced and k - 2 copied out.
//
// Of S bytes each rank moves 2 (N - 1) / N * S through the caches and, from and to its own memory,
// 2 S: reads all of `in`, writes all of `out`. Where `out` is too large for the caches and was not
// read before, it is written past them.
// Source: a reduce-scatter and an allgather as in Rabenseifner's algorithm (Optimization of
// Collective Reduction Operations, 2004), with all peers one load away.
//
// Errors as HostGroup::Await; the group is broken then.
Status AllReduceInPieces(HostGroup* group, const void* in, void* out, int64_t count, DType dtype,
                         int divisor);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_PIECES_ALLREDUCE_H_
