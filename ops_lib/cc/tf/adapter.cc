#include "tf/adapter.h"

#include <memory>
#include <string>
#include <utility>

#include "core/config.h"
#include "runtime/engine.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

namespace ddl {

namespace tf = tensorflow;

namespace {

// Null for the host's memory, which is all that a kernel on a CPU sees.
Status FindPlace(tf::OpKernelContext* context, std::shared_ptr<GpuPlace>* place) {
  const auto* device = context->device()->tensorflow_accelerator_device_info();
  if (device == nullptr) return Status();
  // The stream that the executor gave this op, where it gave one.
  const tf::DeviceContext* own = context->op_device_context();
  stream_executor::Stream* stream = own != nullptr ? own->stream() : device->stream;
  const NcclLibrary* library = nullptr;
  DDL_RETURN_IF_ERROR(LoadNccl(&library));
  *place = std::make_shared<GpuPlace>();
  (*place)->gpu = stream->parent()->device_ordinal();
  (*place)->stream = static_cast<CudaStream>(stream->platform_specific_handle().stream);
  return MarkReady(*library, place->get());
}

}  // namespace

void Submit(tf::OpKernelContext* context, Request request) {
  const Status found = FindPlace(context, &request.place);
  if (!found.ok()) {
    request.done(found);
    return;
  }
  if (request.place != nullptr && request.allocate != nullptr) {
    request.allocate = [allocate = std::move(request.allocate), place = request.place](
                           const std::vector<int64_t>& sizes, void** out) {
      DDL_RETURN_IF_ERROR(allocate(sizes, out));
      const NcclLibrary* library = nullptr;
      DDL_RETURN_IF_ERROR(LoadNccl(&library));
      return MarkReady(*library, place.get());  // again, behind what used that memory before
    };
  }
  Engine::Get().Submit(std::move(request));
}

bool RegisterForGpus(const char* op, bool adds, const char* on_host, KernelFactory create) {
  Config config;
  const NcclLibrary* library = nullptr;
  // A setting without meaning is an error of the engine's start.
  if (!ReadConfig(&config).ok() || config.gpu_transport == GpuTransport::kHost) return false;
  if (!LoadNccl(&library).ok()) return false;
  std::vector<tf::DataType> types = {tf::DT_FLOAT, tf::DT_DOUBLE, tf::DT_HALF, tf::DT_BFLOAT16};
  if (!adds) {
    types.insert(types.end(), {tf::DT_INT64, tf::DT_INT8, tf::DT_UINT8, tf::DT_INT16,
                               tf::DT_UINT16, tf::DT_UINT32, tf::DT_UINT64, tf::DT_BOOL,
                               tf::DT_COMPLEX64, tf::DT_COMPLEX128});
  }
  tf::KernelDefBuilder builder(op);
  builder.Device(tf::DEVICE_GPU).TypeConstraint("T", types);
  if (on_host != nullptr) builder.HostMemory(on_host);
  // The registry keeps what this hands over; the object itself holds nothing.
  tf::kernel_factory::OpKernelRegistrar(builder.Build(), op, create);
  return true;
}

absl::Status ToTensorFlow(const Status& status) {
  switch (status.code()) {
    case Code::kOk: return absl::OkStatus();
    case Code::kInvalidArgument: return absl::InvalidArgumentError(status.message());
    case Code::kFailedPrecondition: return absl::FailedPreconditionError(status.message());
    case Code::kDeadlineExceeded: return absl::DeadlineExceededError(status.message());
    case Code::kUnavailable: return absl::UnavailableError(status.message());
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
