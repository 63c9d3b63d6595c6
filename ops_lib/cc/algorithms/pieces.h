#ifndef DDL_ALGORITHMS_PIECES_H_
#define DDL_ALGORITHMS_PIECES_H_

#include <cstdint>
#include <vector>

#include "algorithms/range.h"
#include "algorithms/tensor_list.h"
#include "core/dtype.h"
#include "core/reduction.h"
#include "core/status.h"
#include "transport/host_group.h"

namespace ddl {

// Collectives for large tensors of the ranks of one host. Every rank has a share of the tensor, one
// contiguous range, and the shares go through shared memory in pieces:
//   scatter   a rank copies a block of each other's share of its own input in
//   reduce    it adds up its own block, from its input and the others' copies, into its output and,
//             if it is for the others too, into shared memory
//   collect   it copies the blocks out that the others have summed, or brought
// Each step of a piece is followed by another piece's, so that a rank seldom waits: piece k is
// scattered, then k - 1 reduced. k - 2 is collected in the same loop that scatters k, because the
// one waits for memory to read and the other to write.
//
// Additions are in rank order, so the result has the same bits whoever computes it and whenever.
// Whether the copies in shared memory are written through the caches or past them is what
// StoreChoice says, on each rank for itself.
//
// dtypes: see core/vector. Errors as HostGroup::Await; the group is broken then.
//
// Source: reduce-scatter and allgather as in Rabenseifner's algorithm (Optimization of Collective
// Reduction Operations, 2004), with all peers one load away.

// out[i] = `reduction` over ranks of in[i], of many tensors in one sequence of
// pieces: small ones share a piece, and none waits until the one before is done. Of the sequence
// only `part`, from a cache line on. Where a tensor lies does not change a bit of the result. An
// `in` may equal its `out`.
//
// Of S bytes each rank moves 2 (N - 1) / N * S through the caches and, from and to its own memory,
// 2 S: reads all of `in`, writes all of `out`. Where the outputs are too large for the caches and
// were not read before, they are written past them.
Status AllReduceInPieces(HostGroup* group, const TensorList& tensors, Range part, DType dtype,
                         Reduction reduction);
Status AllReduceInPieces(HostGroup* group, const std::vector<TensorSpan>& tensors, DType dtype,
                         Reduction reduction);
Status AllReduceInPieces(HostGroup* group, const void* in, void* out, int64_t count, DType dtype,
                         Reduction reduction);

// The first half of it: `out` gets this rank's share of the sum. `shares` are bytes of the sequence
// of tensors, whole elements, best from a cache line on: one range for each rank, the same on every
// rank and perhaps empty; together they need not be all of it. Between tensors `out` gets zeros.
Status ReduceScatterInPieces(HostGroup* group, const TensorList& tensors,
                             const std::vector<Range>& shares, void* out, DType dtype,
                             Reduction reduction);

// The same, but each tensor gets at its output what of this rank's share lies in it; the outputs of
// the rest are not written, and may be null.
Status ReduceScatterInPieces(HostGroup* group, const TensorList& tensors,
                             const std::vector<Range>& shares, DType dtype, Reduction reduction);

// The second half: the tensors' outputs get the shares of all ranks; this rank brings its own at
// `in`, or has it where it goes; or, if `in` is null, at the tensors' inputs. Each byte is written to
// shared memory once and read by all.
Status AllGatherInPieces(HostGroup* group, const TensorList& tensors,
                         const std::vector<Range>& shares, const void* in);

// The same of one tensor that is the shares of all ranks one after the other, nbytes[r] of rank r:
// whole `in` of each, behind another in `out`.
Status AllGatherInPieces(HostGroup* group, const void* in, void* out,
                         const std::vector<int64_t>& nbytes);

// Overwrites `part` of the `nbytes` at `buffer` with those of rank `root`: a gather to which only
// that one brings some.
Status BroadcastInPieces(HostGroup* group, void* buffer, int64_t nbytes, Range part, int root);
Status BroadcastInPieces(HostGroup* group, void* buffer, int64_t nbytes, int root);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_PIECES_H_
