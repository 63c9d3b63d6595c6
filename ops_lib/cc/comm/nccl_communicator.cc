#include "comm/nccl_communicator.h"

#include <dirent.h>

#include <algorithm>
#include <cstring>

#include "core/log.h"
#include "core/backoff.h"
#include "core/stall.h"

namespace ddl {
namespace {

int ToNccl(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return kNcclFloat16;
    case DType::kBfloat16: return kNcclBfloat16;
    case DType::kFloat64: return kNcclFloat64;
    default: return kNcclFloat32;
  }
}

int ToNccl(ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct: return kNcclProduct;
    case ReduceOp::kMax: return kNcclMax;
    case ReduceOp::kMin: return kNcclMin;
    case ReduceOp::kSum: break;
  }
  return kNcclSum;
}

bool IsError(int result) { return result != kNcclSuccess && result != kNcclInProgress; }

Status CudaStatus(const NcclLibrary& library, const char* call, int error) {
  if (error == kCudaSuccess) return Status();
  return Status(Code::kInternal, std::string(call) + " failed: " +
                                     library.cudaGetErrorString(error) +
                                     ". An earlier kernel of the script may have caused it.");
}

// GPUs of this host that the driver shows; 0 where it does not say, as in some containers.
int GpusOfHost() {
  DIR* folder = opendir("/proc/driver/nvidia/gpus");
  if (folder == nullptr) return 0;
  int count = 0;
  while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
  closedir(folder);
  return count;
}

Status CanUseGpus(const Communicator& host, const NcclLibrary** library) {
  DDL_RETURN_IF_ERROR(LoadNccl(library));
  const int gpus = GpusOfHost();
  if (gpus == 0 || host.local_size() <= gpus) return Status();
  return Status(Code::kFailedPrecondition,
                "this host has " + std::to_string(gpus) + " GPUs for " +
                    std::to_string(host.local_size()) +
                    " ranks, and NCCL needs one for each. Start fewer ranks.");
}

}  // namespace

Status MarkReady(const NcclLibrary& library, GpuContext* context) {
  DDL_RETURN_IF_ERROR(CudaStatus(library, "cudaSetDevice", library.cudaSetDevice(context->device)));
  if (context->ready == nullptr) {
    CudaEvent event = nullptr;
    DDL_RETURN_IF_ERROR(
        CudaStatus(library, "cudaEventCreateWithFlags",
                   library.cudaEventCreateWithFlags(&event, kCudaEventDisableTiming)));
    context->ready.reset(event, [&library](CudaEvent old) { library.cudaEventDestroy(old); });
  }
  return CudaStatus(library, "cudaEventRecord",
                    library.cudaEventRecord(context->ready.get(), context->stream));
}

NcclCommunicator::~NcclCommunicator() {
  // Nothing is under way, so nothing is lost; and unlike ncclCommDestroy this waits for no rank.
  Abort();
  if (finished_ != nullptr) library_.cudaEventDestroy(finished_);
  if (stream_ != nullptr) library_.cudaStreamDestroy(stream_);
}

Status NcclCommunicator::AllReduce(const GpuContext& context, const std::vector<Tensor>& tensors,
                                   DType dtype, bool average, ReduceOp op) {
  return Run(context, [&] {
    for (const Tensor& tensor : tensors) {
      if (tensor.count == 0) continue;
      const int result =
          library_.ncclAllReduce(tensor.in, tensor.out, tensor.count, ToNccl(dtype),
                                 average ? kNcclAverage : ToNccl(op), comm_, stream_);
      if (IsError(result)) return result;
    }
    return kNcclSuccess;
  });
}

Status NcclCommunicator::Broadcast(const GpuContext& context, const void* in, void* out,
                                   int64_t nbytes, int root) {
  return Run(context, [&] {
    if (nbytes == 0) return kNcclSuccess;
    return library_.ncclBroadcast(in, out, nbytes, kNcclBytes, root, comm_, stream_);
  });
}

Status NcclCommunicator::AllGather(const GpuContext& context, const void* in, void* out,
                                   const std::vector<int64_t>& nbytes) {
  // NCCL's own gather wants the same from each rank; its broadcasts in a group run together.
  return Run(context, [&] {
    char* to = static_cast<char*>(out);
    for (int root = 0; root < host_->size(); ++root) {
      if (nbytes[root] == 0) continue;
      const int result =
          library_.ncclBroadcast(in, to, nbytes[root], kNcclBytes, root, comm_, stream_);
      if (IsError(result)) return result;
      to += nbytes[root];
    }
    return kNcclSuccess;
  });
}

Status NcclCommunicator::Run(const GpuContext& context, const std::function<int()>& enqueue) {
  DDL_RETURN_IF_ERROR(broken_);
  broken_ = comm_ == nullptr ? Connect(context.device) : Status();
  if (broken_.ok()) broken_ = RunGroup(context, enqueue);
  if (!broken_.ok()) Abort();
  return broken_;
}

Status NcclCommunicator::RunGroup(const GpuContext& context, const std::function<int()>& enqueue) {
  if (context.device != gpu_) {
    return Status(Code::kFailedPrecondition,
                  "rank " + std::to_string(host_->rank()) + " has a tensor on GPU " +
                      std::to_string(context.device) + ", but NCCL started on its GPU " +
                      std::to_string(gpu_) +
                      ". Keep what is reduced on one GPU in each rank, or set DDL_GPU=host.");
  }
  DDL_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", library_.cudaSetDevice(gpu_)));
  DDL_RETURN_IF_ERROR(CheckCuda("cudaStreamWaitEvent",
                                library_.cudaStreamWaitEvent(stream_, context.ready.get(), 0)));
  DDL_RETURN_IF_ERROR(Check("ncclGroupStart", library_.ncclGroupStart()));
  const int enqueued = enqueue();
  const int ended = library_.ncclGroupEnd();  // also after an error: this thread is in the group
  DDL_RETURN_IF_ERROR(Check("NCCL", enqueued));
  DDL_RETURN_IF_ERROR(Check("ncclGroupEnd", ended));
  // Only when NCCL's threads have put it all into the stream is there something to record.
  DDL_RETURN_IF_ERROR(WaitFor("ncclGroupEnd", nullptr));
  DDL_RETURN_IF_ERROR(
      CheckCuda("cudaEventRecord", library_.cudaEventRecord(finished_, stream_)));
  return WaitFor("a collective of NCCL", finished_);
}

Status NcclCommunicator::Connect(int gpu) {
  // In each step all ranks take part, whatever has failed before.
  NcclUniqueId id{};
  DDL_RETURN_IF_ERROR(Vote(Prepare(gpu, &id)));
  DDL_RETURN_IF_ERROR(host_->Broadcast(&id, sizeof(id), 0));
  NcclConfig config;
  Status started = Check("ncclCommInitRankConfig",
                         library_.ncclCommInitRankConfig(&comm_, host_->size(), id, host_->rank(),
                                                         &config));
  if (started.ok()) started = WaitFor("ncclCommInitRankConfig", nullptr);
  return Vote(started);
}

Status NcclCommunicator::Prepare(int gpu, NcclUniqueId* id) {
  DDL_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", library_.cudaSetDevice(gpu)));
  gpu_ = gpu;
  DDL_RETURN_IF_ERROR(
      CheckCuda("cudaStreamCreateWithFlags",
                library_.cudaStreamCreateWithFlags(&stream_, kCudaStreamNonBlocking)));
  DDL_RETURN_IF_ERROR(
      CheckCuda("cudaEventCreateWithFlags",
                library_.cudaEventCreateWithFlags(&finished_, kCudaEventDisableTiming)));
  if (host_->rank() != 0) return Status();
  return Check("ncclGetUniqueId", library_.ncclGetUniqueId(id));
}

Status NcclCommunicator::Vote(const Status& mine) {
  int32_t failures = mine.ok() ? 0 : 1;
  DDL_RETURN_IF_ERROR(host_->AllReduce(&failures, &failures, 1, DType::kInt32, 1));
  if (failures == 0) return Status();
  const std::string fix =
      " Give each rank a GPU of its own, or set DDL_GPU=host to go through the host's memory.";
  if (mine.ok()) {
    return Status(Code::kFailedPrecondition, "NCCL did not start on " + std::to_string(failures) +
                                                 " other ranks; they say why." + fix);
  }
  return Status(Code::kFailedPrecondition, "NCCL did not start: " + mine.message() + fix);
}

Status NcclCommunicator::WaitFor(const char* what, CudaEvent event) {
  const Backoff backoff(0);  // the GPU is never there within a look
  StallClock clock;
  WarningSchedule warnings(timeout_s_);
  while (true) {
    int state = kNcclSuccess;
    DDL_RETURN_IF_ERROR(
        Check("ncclCommGetAsyncError", library_.ncclCommGetAsyncError(comm_, &state)));
    if (state != kNcclInProgress) {
      DDL_RETURN_IF_ERROR(Check(what, state));
      const int reached = event == nullptr ? kCudaSuccess : library_.cudaEventQuery(event);
      if (reached != kCudaNotReady) return CheckCuda("cudaEventQuery", reached);
    }
    const double elapsed = clock.Poll();
    if (elapsed > timeout_s_) {
      return Status(Code::kDeadlineExceeded,
                    std::string(what) + " did not end within " + Seconds(timeout_s_) +
                        " (DDL_STALL_TIMEOUT). All ranks had come to it, so a GPU, its rank or the "
                        "way to it was lost. See the other ranks' output, and NCCL_DEBUG=INFO.");
    }
    if (warnings.Due(elapsed)) {
      LogLine(host_->rank(), std::string(what) + " has not ended after " + Seconds(elapsed));
    }
    backoff.Pause();
  }
}

Status NcclCommunicator::Check(const char* call, int result) const {
  if (!IsError(result)) return Status();
  const char* detail = library_.ncclGetLastError(comm_);
  std::string text = std::string(call) + " failed: " + library_.ncclGetErrorString(result);
  if (detail != nullptr && detail[0] != '\0') text += std::string(": ") + detail;
  return Status(Code::kInternal, text + ". NCCL_DEBUG=INFO tells more.");
}

Status NcclCommunicator::CheckCuda(const char* call, int error) const {
  return CudaStatus(library_, call, error);
}

void NcclCommunicator::Abort() {
  if (comm_ == nullptr) return;
  library_.ncclCommAbort(comm_);
  comm_ = nullptr;
}

Status ConnectGpus(GpuTransport transport, double timeout_s, Communicator* host,
                   std::unique_ptr<NcclCommunicator>* gpus, std::string* why) {
  const NcclLibrary* library = nullptr;
  const Status usable = transport == GpuTransport::kHost
                            ? Status(Code::kFailedPrecondition, "DDL_GPU is host")
                            : CanUseGpus(*host, &library);
  int32_t votes[] = {transport == GpuTransport::kHost, transport == GpuTransport::kNccl,
                     usable.ok()};
  const int size = host->size();
  DDL_RETURN_IF_ERROR(host->AllReduce(votes, votes, 3, DType::kInt32, 1));
  if (votes[0] % size != 0 || votes[1] % size != 0) {
    return Status(Code::kFailedPrecondition,
                  "DDL_GPU differs among the ranks. Give all of them the same value.");
  }
  if (votes[2] == size) {
    *gpus = std::make_unique<NcclCommunicator>(*library, host, timeout_s);
    return Status();
  }
  *why = usable.ok() ? "other ranks have no GPU or no NCCL" : usable.message();
  if (transport != GpuTransport::kNccl) return Status();
  return Status(Code::kFailedPrecondition, "DDL_GPU is nccl, but " + *why);
}

}  // namespace ddl
