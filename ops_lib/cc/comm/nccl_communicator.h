#ifndef DDL_COMM_NCCL_COMMUNICATOR_H_
#define DDL_COMM_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl_library.h"
#include "core/config.h"
#include "core/dtype.h"
#include "core/gpu_context.h"
#include "core/reduction.h"
#include "core/status.h"

namespace ddl {

// Marks the tensors of `context` as ready once the GPU has done what its stream holds now: the work
// that makes the inputs, and the work that still uses memory which has become an output since.
// TensorFlow gives memory away in the order of its stream, so mark after the last allocation.
Status MarkReady(const NcclLibrary& library, GpuContext* context);

// A group of ranks whose tensors lie on GPUs, a GPU of its own for each rank. One thread uses it.
// Its collectives do not check that the ranks ask for the same thing: runtime/agreement does.
//
// NCCL works in a stream of its own, behind `ready`, beside the script's stream: the backward pass
// goes on meanwhile. Each call waits until the GPU is done. So whoever is told the result may use
// it in any stream, the memory is held as long as it is used, and an error is the error of the
// call. (To let the script's stream wait instead of this thread would save some microseconds, but
// stop all that the script has put behind, and leave an error to nobody.)
//
// An error ends the group, since NCCL cannot say which ranks have what: it answers every later
// call. FailedPrecondition if NCCL cannot start, DeadlineExceeded if a collective does not end
// within the timeout, else Internal.
class NcclCommunicator {
 public:
  struct Tensor {
    const void* in;
    void* out;  // may equal `in`
    int64_t count;
  };

  // `library` and `host`, the same ranks, must outlive this object.
  NcclCommunicator(const NcclLibrary& library, Communicator* host, double timeout_s)
      : library_(library), host_(host), timeout_s_(timeout_s) {}
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;

  // `op` over the ranks of each tensor, or their average. float16, bfloat16, float32, float64.
  // In NCCL's arithmetic: halves are rounded at every addition, and an average multiplies by
  // 1 / ranks before it adds.
  Status AllReduce(const GpuContext& context, const std::vector<Tensor>& tensors, DType dtype,
                   bool average, ReduceOp op = ReduceOp::kSum);

  // Fills `out` with the `nbytes` that rank `root` has in `in`.
  Status Broadcast(const GpuContext& context, const void* in, void* out, int64_t nbytes, int root);

  // As Communicator::AllGather.
  Status AllGather(const GpuContext& context, const void* in, void* out,
                   const std::vector<int64_t>& nbytes);

 private:
  // Runs what `enqueue` asks of NCCL as one group; `enqueue` returns the first result that is an
  // error, or success.
  Status Run(const GpuContext& context, const std::function<int()>& enqueue);
  Status RunGroup(const GpuContext& context, const std::function<int()>& enqueue);
  Status Connect(int gpu);
  Status Prepare(int gpu, NcclUniqueId* id);
  Status Vote(const Status& mine);
  // Waits for NCCL's own threads, and for `event` if there is one.
  Status WaitFor(const char* what, CudaEvent event);
  Status Check(const char* call, int result) const;
  Status CheckCuda(const char* call, int error) const;
  void Abort();

  const NcclLibrary& library_;
  Communicator* host_;
  double timeout_s_;
  Status broken_;
  int gpu_ = -1;  // once there is a stream
  NcclComm comm_ = nullptr;
  CudaStream stream_ = nullptr;
  CudaEvent finished_ = nullptr;
};

// Makes `*gpus` if tensors of GPUs travel by NCCL, as DDL_GPU and the machines have it: all ranks
// decide alike. Else `*gpus` is null and `*why` says why. FailedPrecondition if the ranks have
// different settings, or DDL_GPU is nccl and a rank cannot. Collective over `host`.
Status ConnectGpus(GpuTransport transport, double timeout_s, Communicator* host,
                   std::unique_ptr<NcclCommunicator>* gpus, std::string* why);

}  // namespace ddl

#endif  // DDL_COMM_NCCL_COMMUNICATOR_H_
