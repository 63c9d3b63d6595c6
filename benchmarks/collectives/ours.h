#ifndef DDL_BENCHMARKS_COLLECTIVES_OURS_H_
#define DDL_BENCHMARKS_COLLECTIVES_OURS_H_

#include <cstdint>

#include "comm/communicator.h"
#include "require.h"
#include "runtime/gather.h"
#include "runtime/inline_request.h"
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

// Any collective, in the same steps as the engine, which are those below its thread.
inline void Ours(ddl::Communicator& group, ddl::InlineRequest* inlined,
                 const ddl::Request& request) {
  ddl::InlineTensor small;
  ddl::Arrival arrival;
  arrival.digest[0] = static_cast<uint64_t>(request.kind);
  const bool packed = inlined->Pack(request, &small);
  if (packed) {
    arrival.in = small.in;
    arrival.out = small.out;
    arrival.count = small.count;
    arrival.dtype = small.dtype;
    arrival.reduction = small.reduction;
  }
  ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
  Require(group.Barrier(arrival, &result));
  if (result != ddl::BarrierResult::kMatch) Die("ranks disagree");
  if (packed && inlined->Unpack(request)) return;
  const std::vector<int64_t>* const numbers = packed ? &inlined->numbers() : nullptr;
  const ddl::TensorBuffer& only = request.tensors[0];
  int64_t nbytes = only.count * static_cast<int64_t>(ddl::DTypeSize(request.dtype));
  switch (request.kind) {
    case ddl::Request::Kind::kAllReduce:
      return Require(group.AllReduce(only.in, only.out, only.count, request.dtype, 1));
    case ddl::Request::Kind::kAllGather:
      return Require(ddl::Gather(&group, nullptr, request, numbers, &nbytes));
    case ddl::Request::Kind::kReduceScatter:
      return Require(ddl::ReduceScatter(&group, request, 1));
    case ddl::Request::Kind::kAllToAll:
      return Require(ddl::AllToAll(&group, request, numbers, &nbytes));
    default: return Require(group.Broadcast(only.out, nbytes, request.root));
  }
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_OURS_H_
