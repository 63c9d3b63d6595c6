#ifndef DDL_BENCHMARKS_COLLECTIVES_OURS_H_
#define DDL_BENCHMARKS_COLLECTIVES_OURS_H_

#include <cstdint>

#include "comm/communicator.h"
#include "require.h"

// As the engine does it: agreement and sum in one round where the tensor is small and the ranks
// share memory, else one after the other.
inline void Ours(ddl::Communicator& group, const float* in, float* out, int64_t count) {
  ddl::Arrival arrival;
  arrival.digest[0] = count;
  const bool small = group.ReducesInline() && count * 4 <= ddl::kMaxInlineBytes;
  if (small) {
    arrival.in = in;
    arrival.out = out;
    arrival.count = count;
  }
  ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
  Require(group.Barrier(arrival, &result));
  if (result != ddl::BarrierResult::kMatch) Die("ranks disagree");
  if (!small) Require(group.AllReduce(in, out, count, ddl::DType::kFloat32, 1));
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_OURS_H_
