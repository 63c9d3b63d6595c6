#ifndef DDL_ALGORITHMS_HALVING_DOUBLING_H_
#define DDL_ALGORITHMS_HALVING_DOUBLING_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/reduction.h"
#include "transport/transport.h"

namespace ddl {

// Both: out[i] = `reduction` over ranks of in[i], the same bits on every rank and in
// every run. `in` may equal `out`. dtypes: see core/vector.
//
// P is the largest power of two up to the number of ranks N. Where N is larger, N - P ranks first
// hand their values to their neighbours, and get the result from them at the end: two steps more,
// of S bytes each. Additions form a tree, in which the lower rank's sum is always the first operand.
// Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
// MPICH, 2005.

// Recursive halving, then doubling: in each step a rank and its partner, P / 2, P / 4, ... 1 away,
// each add up one half of what they have in common; then they hand each other what they have summed.
//
// 2 log2(P) steps; each rank sends 2 (P - 1) / P * S of S bytes.
Status HalvingDoublingAllReduce(Transport* transport, const void* in, void* out, int64_t count,
                                DType dtype, Reduction reduction);

// Recursive doubling: in each step partners exchange all they have and both add it up.
//
// log2(P) steps, the least there can be; each rank sends log2(P) * S bytes.
Status DoublingAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                         Reduction reduction);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_HALVING_DOUBLING_H_
