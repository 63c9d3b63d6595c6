#include "tf/adapter.h"

#include <string>
#include <utility>

namespace ddl {

namespace tf = tensorflow;

absl::Status ToTensorFlow(const Status& status) {
  switch (status.code()) {
    case Code::kOk: return absl::OkStatus();
    case Code::kInvalidArgument: return absl::InvalidArgumentError(status.message());
    case Code::kFailedPrecondition: return absl::FailedPreconditionError(status.message());
    case Code::kDeadlineExceeded: return absl::DeadlineExceededError(status.message());
    case Code::kAborted: return absl::AbortedError(status.message());
    case Code::kInternal: break;
  }
  return absl::InternalError(status.message());
}

CollectiveKernel::CollectiveKernel(tf::OpKernelConstruction* construction)
    : AsyncOpKernel(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("ordered", &ordered_));
}

Request CollectiveKernel::NewRequest(Request::Kind kind, tf::OpKernelContext* context,
                                     DoneCallback done) {
  Request request;
  request.kind = kind;
  request.op_name = type_string();
  request.name = name();
  // TensorFlow runs iterations of a loop in parallel: without this, one of ours could meet another
  // one of theirs. The frame's number is a hash of names and iterations, the same on every rank.
  if (const tf::FrameAndIter loop = context->frame_iter(); loop.frame_id != 0) {
    request.instance = " iteration " + std::to_string(loop.iter_id) + " of loop " +
                       std::to_string(loop.frame_id);
  }
  request.ordered = ordered_;
  request.dtype = ToDType(input_type(0));
  request.done = [context, done = std::move(done)](const Status& status) {
    if (!status.ok()) context->SetStatus(ToTensorFlow(status));
    done();
  };
  return request;
}

DType ToDType(tf::DataType dtype) {
  switch (dtype) {
    case tf::DT_DOUBLE: return DType::kFloat64;
    case tf::DT_INT32: return DType::kInt32;
    case tf::DT_INT64: return DType::kInt64;
    case tf::DT_HALF: return DType::kFloat16;
    case tf::DT_BFLOAT16: return DType::kBfloat16;
    case tf::DT_INT8: return DType::kInt8;
    case tf::DT_UINT8: return DType::kUint8;
    case tf::DT_INT16: return DType::kInt16;
    case tf::DT_UINT16: return DType::kUint16;
    case tf::DT_UINT32: return DType::kUint32;
    case tf::DT_UINT64: return DType::kUint64;
    case tf::DT_BOOL: return DType::kBool;
    case tf::DT_COMPLEX64: return DType::kComplex64;
    case tf::DT_COMPLEX128: return DType::kComplex128;
    default: return DType::kFloat32;
  }
}

TensorBuffer ToBuffer(const void* in, const tf::Tensor& out) {
  TensorBuffer buffer;
  buffer.in = in;
  buffer.out = out.data();
  buffer.count = out.NumElements();
  for (int i = 0; i < out.dims(); ++i) buffer.dims.push_back(out.dim_size(i));
  return buffer;
}

}  // namespace ddl
