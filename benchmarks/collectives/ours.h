#ifndef DDL_BENCHMARKS_COLLECTIVES_OURS_H_
#define DDL_BENCHMARKS_COLLECTIVES_OURS_H_

#include <cstdint>

#include "comm/communicator.h"
#include "require.h"
#include "runtime/gather.h"
#include "runtime/request.h"

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

// Any collective of float32, in the same steps as the engine, which are those below its thread.
inline void Ours(ddl::Communicator& group, const ddl::Request& request) {
  const ddl::TensorBuffer& only = request.tensors[0];
  if (request.kind == ddl::Request::Kind::kAllReduce) {
    return Ours(group, static_cast<const float*>(only.in), static_cast<float*>(only.out),
                only.count);
  }
  ddl::Arrival arrival;
  arrival.digest[0] = static_cast<uint64_t>(request.kind);
  ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
  Require(group.Barrier(arrival, &result));
  if (result != ddl::BarrierResult::kMatch) Die("ranks disagree");
  int64_t nbytes = only.count * 4;
  switch (request.kind) {
    case ddl::Request::Kind::kAllGather:
      return Require(ddl::Gather(&group, nullptr, request, &nbytes));
    case ddl::Request::Kind::kReduceScatter:
      return Require(ddl::ReduceScatter(&group, request, ddl::Reduction{1}));
    case ddl::Request::Kind::kAllToAll: return Require(ddl::AllToAll(&group, request, &nbytes));
    default: return Require(group.Broadcast(only.out, nbytes, request.root));
  }
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_OURS_H_
