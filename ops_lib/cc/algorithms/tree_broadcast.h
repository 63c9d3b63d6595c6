#ifndef DDL_ALGORITHMS_TREE_BROADCAST_H_
#define DDL_ALGORITHMS_TREE_BROADCAST_H_

#include <cstdint>

#include "transport/transport.h"

namespace ddl {

// Overwrites `nbytes` at `buffer` with those of rank `root`. Below, r counts from the root on.
//
// Up to a segment's worth for each rank along a binomial tree: rank r gets all from r without its
// lowest bit. ceil(log2 N) steps; the root sends up to that many times S bytes. Source: Thakur,
// Rabenseifner and Gropp, 2005 (see halving_doubling.h), section 4.3.
//
// More along a chain, from each rank to the next, in segments: a rank passes one on while the next
// is coming. Each sends S bytes, once, so the last rank has them N - 2 segments after the second.
Status TreeBroadcast(Transport* transport, void* buffer, int64_t nbytes, int root);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_TREE_BROADCAST_H_
