#include "runtime/fused_allreduce.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/arithmetic.h"
#include "core/half.h"
#include "core/numbers.h"

namespace ddl {

Status FusedAllReduce::Run(const Request& request) {
  if (request.tolerance > 0) return RunChecked(request);
  return request.unfused ? RunUnfused(request) : RunFused(request);
}

Status FusedAllReduce::ReduceBaseline(const Request& request, const void* in, void* out,
                                      int64_t count) {
  const Reduction reduction = ReductionOf(request, communicator_->size());
  const int divisor = reduction.divisor;
  if (IsHalf(request.dtype)) {
    // MPI has no such types.
    if (static_cast<int64_t>(wide_.size()) < count) wide_.resize(count);
    float* wide = wide_.data();
    Widen(in, wide, count, request.dtype);
    DDL_RETURN_IF_ERROR(communicator_->baseline()->AllReduce(wide, wide, count, DType::kFloat32));
    Divide(wide, count, DType::kFloat32, divisor);
    Narrow(wide, out, count, request.dtype);
    return Status();
  }
  if (SumsWide(request.dtype, reduction)) {
    // int32, the only such type that asks for the baseline.
    const int32_t* values = static_cast<const int32_t*>(in);
    std::vector<int64_t> sums(values, values + count);
    DDL_RETURN_IF_ERROR(
        communicator_->baseline()->AllReduce(sums.data(), sums.data(), count, DType::kInt64));
    int32_t* averages = static_cast<int32_t*>(out);
    for (int64_t i = 0; i < count; ++i) averages[i] = static_cast<int32_t>(sums[i] / divisor);
    return Status();
  }
  DDL_RETURN_IF_ERROR(communicator_->baseline()->AllReduce(in, out, count, request.dtype));
  if (request.average) Divide(out, count, request.dtype, divisor);
  return Status();
}

Status FusedAllReduce::RunUnfused(const Request& request) {
  for (const TensorBuffer& tensor : request.tensors) {
    DDL_RETURN_IF_ERROR(ReduceBaseline(request, tensor.in, tensor.out, tensor.count));
  }
  return Status();
}

Status FusedAllReduce::RunFused(const Request& request) {
  const Reduction reduction = ReductionOf(request, communicator_->size());
  if (!request.adasum && request.tensors.size() == 1) {
    const TensorBuffer& only = request.tensors[0];
    return communicator_->AllReduce(only.in, only.out, only.count, request.dtype, reduction);
  }
  std::vector<TensorSpan> tensors;
  for (const TensorBuffer& one : request.tensors) tensors.push_back({one.in, one.out, one.count});
  if (request.adasum) {
    const Status status = adasum_.Run(tensors, request.dtype);
    if (status.code() != Code::kInvalidInput) return status;
    return Status(status.code(),
                  request.op_name + " \"" + request.name + "\": " + status.message());
  }
  return communicator_->AllReduceN(tensors, request.dtype, reduction);
}

Status FusedAllReduce::RunChecked(const Request& request) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  // First, because outputs may overwrite the inputs.
  std::vector<std::vector<char>> expected;
  for (const TensorBuffer& tensor : request.tensors) {
    expected.emplace_back(tensor.count * element);
    DDL_RETURN_IF_ERROR(
        ReduceBaseline(request, tensor.in, expected.back().data(), tensor.count));
  }
  DDL_RETURN_IF_ERROR(request.unfused ? RunUnfused(request) : RunFused(request));
  std::vector<double> deviations;
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    deviations.push_back(static_cast<double>(
        CountDeviations(request.tensors[i].out, expected[i].data(), request.tensors[i].count,
                        request.dtype, request.tolerance)));
  }
  // Summed over the ranks, so that all of them fail together.
  DDL_RETURN_IF_ERROR(communicator_->AllReduce(deviations.data(), deviations.data(),
                                               static_cast<int64_t>(deviations.size()),
                                               DType::kFloat64, 1));
  for (size_t i = 0; i < deviations.size(); ++i) {
    if (deviations[i] == 0) continue;
    return Status(Code::kInternal,
                  request.op_name + " \"" + request.name + "\": tensor " + std::to_string(i) +
                      " has " + std::to_string(static_cast<int64_t>(deviations[i])) +
                      " elements (over all ranks) that differ from MPI_Allreduce by more than " +
                      Format("%g", request.tolerance) +
                      ". Raise check for sums of very different magnitudes; else report a bug.");
  }
  return Status();
}

}  // namespace ddl
