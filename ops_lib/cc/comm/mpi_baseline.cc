#include "comm/mpi_baseline.h"

#include <algorithm>

#include "transport/mpi_transport.h"

namespace ddl {
namespace {

// MPI counts are int; larger buffers go in pieces of this many elements.
constexpr int64_t kMaxCount = int64_t{1} << 30;

MPI_Datatype ToMpi(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return MPI_FLOAT;
    case DType::kFloat64: return MPI_DOUBLE;
    case DType::kInt32: return MPI_INT32_T;
    case DType::kInt64: return MPI_INT64_T;
    default: return MPI_DATATYPE_NULL;
  }
}

}  // namespace

Status MpiBaseline::AllReduce(const void* in, void* out, int64_t count, DType dtype) {
  DDL_RETURN_IF_ERROR(broken_);
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  for (int64_t first = 0; first < count; first += kMaxCount) {
    const int n = static_cast<int>(std::min(kMaxCount, count - first));
    const void* from = in == out ? MPI_IN_PLACE : static_cast<const char*>(in) + first * element;
    DDL_RETURN_IF_ERROR(MpiStatus(MPI_Allreduce(from, static_cast<char*>(out) + first * element, n,
                                                ToMpi(dtype), MPI_SUM, comm_),
                                  "MPI_Allreduce"));
  }
  return Status();
}

}  // namespace ddl
