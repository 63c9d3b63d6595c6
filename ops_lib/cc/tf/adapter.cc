#include "tf/adapter.h"

#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "comm/nccl_communicator.h"
#include "core/config.h"
#include "runtime/description.h"
#include "runtime/process_sets.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tf/eager_names.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

namespace ddl {

namespace tf = tensorflow;

namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Null for the host's memory, which is all that a kernel on a CPU sees.
Status FindGpu(tf::OpKernelContext* context, std::shared_ptr<GpuContext>* gpu) {
  const auto* device = context->device()->tensorflow_accelerator_device_info();
  if (device == nullptr) return Status();
  // The stream that the executor gave this op, where it gave one.
  const tf::DeviceContext* own = context->op_device_context();
  stream_executor::Stream* stream = own != nullptr ? own->stream() : device->stream;
  const NcclLibrary* library = nullptr;
  DDL_RETURN_IF_ERROR(LoadNccl(&library));
  *gpu = std::make_shared<GpuContext>();
  (*gpu)->device = stream->parent()->device_ordinal();
  (*gpu)->stream = static_cast<CudaStream>(stream->platform_specific_handle().stream);
  return MarkReady(*library, gpu->get());
}

// They live as long as the process: kernels may outlive one another.
Runs* RunsOf(int process_set, const std::string& stream) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::pair<int, std::string>, Runs>;
  std::lock_guard<std::mutex> lock(mutex);
  return &(*all)[{process_set, stream}];
}

}  // namespace

void KernelCompletion::Complete(Status status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (complete_) return;
    complete_ = true;
  }
  if (status.code() != Code::kCancelled && deregister_) deregister_();
  if (status.code() == Code::kInvalidArgument) status = Status(mismatch_, status.message());
  if (!status.ok()) context_->SetStatus(ToTensorFlow(status));
  const tf::AsyncOpKernel::DoneCallback done = std::move(done_);  // which may end `this`
  done();
}

absl::Status KernelCompletion::WithContext(
    const std::function<absl::Status(tf::OpKernelContext*)>& use) {
  std::lock_guard<std::mutex> lock(mutex_);
  return use(complete_ ? nullptr : context_);
}

bool RegisterForGpus(const char* op, bool adds, const std::vector<const char*>& on_host,
                     KernelFactory create) {
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
  for (const char* argument : on_host) builder.HostMemory(argument);
  // The registry keeps what this hands over; the object itself holds nothing.
  tf::kernel_factory::OpKernelRegistrar(builder.Build(), op, create);
  return true;
}

absl::Status ToTensorFlow(const Status& status) {
  switch (status.code()) {
    case Code::kOk: return absl::OkStatus();
    case Code::kInvalidArgument:
    case Code::kInvalidInput: return absl::InvalidArgumentError(status.message());
    case Code::kFailedPrecondition: return absl::FailedPreconditionError(status.message());
    case Code::kDeadlineExceeded: return absl::DeadlineExceededError(status.message());
    case Code::kCancelled: return absl::CancelledError(status.message());
    case Code::kAborted: return absl::FailedPreconditionError(status.message());
    case Code::kUnavailable:
    case Code::kInternal: break;
  }
  return absl::InternalError(status.message());
}

CollectiveKernel::CollectiveKernel(tf::OpKernelConstruction* construction)
    : AsyncOpKernel(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("ordered", &ordered_));
  if (construction->HasAttr("process_set")) {
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set", &process_set_));
  }
  OP_REQUIRES_OK(construction, construction->GetAttr("request", &request_));
  OP_REQUIRES_OK(construction, construction->GetAttr("stream", &stream_));
  std::string mismatch;
  OP_REQUIRES_OK(construction, construction->GetAttr("mismatch", &mismatch));
  if (mismatch == "failed_precondition") mismatch_ = Code::kFailedPrecondition;
  if (request_.empty()) request_ = name();
  stream_ = OneLine(stream_);
  runs_ = RunsOf(process_set_, stream_);
}

void CollectiveKernel::ComputeAsync(tf::OpKernelContext* context, DoneCallback done) {
  if (!ordered_) {
    Start(context, std::move(done));
    return;
  }
  const int64_t step = context->step_id();  // of one call of a tf.function
  bool alone = true;
  {
    std::lock_guard<std::mutex> lock(runs_->mutex);
    alone = runs_->unfinished == 0 || (runs_->step == step && step != 0);
    if (alone) {
      ++runs_->unfinished;
      runs_->step = step;
    }
  }
  if (!alone) {
    context->SetStatus(absl::FailedPreconditionError(
        type_string() + " \"" + TakeName(request_) +
        "\": two threads run collectives of one thread at once, and the ranks cannot tell whose "
        "turn it is. Make a tf.function in the thread that runs it."));
    done();
    return;
  }
  Start(context, [runs = runs_, done = std::move(done)] {
    {
      std::lock_guard<std::mutex> lock(runs->mutex);
      --runs->unfinished;
    }
    done();
  });
}

std::optional<Topology> CollectiveKernel::GroupTopology() const {
  Topology topology;
  Engine* engine = nullptr;
  const bool found = ProcessSets::Get().Find(process_set_, &engine).ok();
  if (!found || !engine->Started(&topology)) return std::nullopt;
  return topology;
}

Request CollectiveKernel::NewRequest(Request::Kind kind, tf::OpKernelContext* context) const {
  Request request;
  request.kind = kind;
  request.op_name = type_string();
  request.name = TakeName(request_);
  // TensorFlow runs iterations of a loop in parallel: without this, one of ours could be matched
  // with another one of theirs. The frame's number is a hash of names and iterations, the same on
  // every rank.
  if (const tf::FrameAndIter loop = context->frame_iter(); loop.frame_id != 0) {
    request.instance = " iteration " + std::to_string(loop.iter_id) + " of loop " +
                       std::to_string(loop.frame_id);
  }
  // Where a rank waits in several sets, its warnings must tell which.
  if (process_set_ != 0) request.instance += " in process set " + std::to_string(process_set_);
  request.ordered = ordered_;
  request.stream = stream_;
  request.run = context->step_id();
  // Each session has devices of its own.
  request.session = context->device()->attributes().incarnation();
  request.dtype = ToDType(output_type(0));
  return request;
}

std::shared_ptr<KernelCompletion> CollectiveKernel::NewCompletion(tf::OpKernelContext* context,
                                                                  DoneCallback done) const {
  return std::make_shared<KernelCompletion>(context, std::move(done), mismatch_);
}

void CollectiveKernel::SetSignature(Request* request,
                                    const std::vector<const tf::Tensor*>& shaped) {
  const auto same = [&](const Signature& signature) {
    if (signed_name_ != request->name || signature.dims.size() != shaped.size()) return false;
    for (size_t i = 0; i < shaped.size(); ++i) {
      const std::vector<int64_t>& dims = signature.dims[i];
      if (static_cast<int>(dims.size()) != shaped[i]->dims()) return false;
      for (size_t d = 0; d < dims.size(); ++d) {
        if (dims[d] != shaped[i]->dim_size(static_cast<int>(d))) return false;
      }
    }
    return true;
  };
  std::lock_guard<std::mutex> lock(mutex_);
  if (signature_ == nullptr || !same(*signature_)) {
    for (size_t i = 0; i < shaped.size(); ++i) {
      std::vector<int64_t>* dims = &request->tensors[i].dims;
      for (int d = 0; d < shaped[i]->dims(); ++d) dims->push_back(shaped[i]->dim_size(d));
    }
    signature_ = ddl::MakeSignature(*request);
    signed_name_ = request->name;
  }
  request->signature = signature_;
}

void CollectiveKernel::Submit(tf::OpKernelContext* context, Request request,
                              const std::vector<const tf::Tensor*>& shaped,
                              std::shared_ptr<Tensors> memory,
                              std::shared_ptr<KernelCompletion> completion) {
  Engine* engine = nullptr;
  Status found = ProcessSets::Get().Find(process_set_, &engine);
  if (!found.ok()) found = Status(found.code(), Title(request) + ": " + found.message());
  if (found.ok()) found = FindGpu(context, &request.gpu);
  if (!found.ok()) {
    completion->Complete(found);
    return;
  }
  SetSignature(&request, shaped);
  request.memory = std::move(memory);
  request.done = [completion](const Status& status) { completion->Complete(status); };
  if (request.gpu != nullptr) {
    if (request.allocate != nullptr) {
      request.allocate = [allocate = std::move(request.allocate), gpu = request.gpu](
                             const std::vector<int64_t>& sizes, void** outs) {
        DDL_RETURN_IF_ERROR(allocate(sizes, outs));
        const NcclLibrary* library = nullptr;
        DDL_RETURN_IF_ERROR(LoadNccl(&library));
        return MarkReady(*library, gpu.get());  // again, behind what used that memory before
      };
    }
    // Its memory belongs to the device's streams: there it runs to its end.
    engine->Submit(std::move(request));
    return;
  }
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  const auto cancel = [engine, cancelled, completion, title = Title(request)] {
    cancelled->store(true);
    engine->NotifyCancelled();
    completion->Complete(Status(Code::kCancelled, title + ": cancelled with its step."));
  };
  request.cancelled = cancelled;
  const bool in_time = OnCancellation(context, completion.get(), cancel);
  engine->Submit(std::move(request));
  if (!in_time) cancel();  // the other ranks must know that it does not come
}

bool CollectiveKernel::OnCancellation(tf::OpKernelContext* context, KernelCompletion* completion,
                                      const std::function<void()>& cancel) {
  tf::CancellationManager* manager = context->cancellation_manager();
  if (manager == nullptr) return true;
  const tf::CancellationToken token = manager->get_cancellation_token();
  completion->set_deregister([manager, token] { (void)manager->TryDeregisterCallback(token); });
  return manager->RegisterCallback(token, cancel);
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

void SetReduction(const std::string& op, Request* request) {
  request->average = op == "avg";
  request->adasum = op == "adasum";
  if (!request->average && !request->adasum) (void)FindReduceOp(op, &request->op);
}

absl::Status AllocateOutput(tf::OpKernelContext* context, int index, const tf::TensorShape& shape,
                            tf::Tensor** output) {
  TF_RETURN_IF_ERROR(context->allocate_output(index, shape, output));
  AdviseHugePages(*context, **output);
  return absl::OkStatus();
}

void AdviseHugePages(const tf::OpKernelContext& context, const tf::Tensor& output) {
  if (context.device()->tensorflow_accelerator_device_info() != nullptr) return;
  const auto begin = reinterpret_cast<uintptr_t>(output.data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + output.TotalBytes()) / kHugePage * kHugePage;
  // Where there are none, or they are not to be used, the pages stay as they are.
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

TensorBuffer ToBuffer(const void* in, const tf::Tensor& out) {
  TensorBuffer buffer;
  buffer.in = in;
  buffer.out = out.data();
  buffer.count = out.NumElements();
  return buffer;
}

}  // namespace ddl
