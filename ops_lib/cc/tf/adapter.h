#ifndef DDL_TF_ADAPTER_H_
#define DDL_TF_ADAPTER_H_

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"
#include "runtime/engine.h"
#include "runtime/request.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace ddl {

// The TensorFlow error type of each Code: InvalidArgument, FailedPrecondition, DeadlineExceeded,
// Cancelled, Internal. None that TensorFlow 1's MonitoredSession takes for a preemption (Aborted,
// Unavailable): it would start the step again, for ever.
absl::Status ToTensorFlow(const Status& status);

// The attributes of every collective.
//   ordered   something above the ops keeps the order
//   request   the name by which ranks know it, or where that is (see tf/eager_names.h); empty: that
//             of the op. For eager ops, which have none
//   stream    of ordered ones: the thread that keeps the order, see Request
//   mismatch  the error where ranks differ
inline constexpr char kOrderedAttribute[] = "ordered: bool = false";
inline constexpr char kRequestAttribute[] = "request: string = ''";
inline constexpr char kStreamAttribute[] = "stream: string = ''";
//   process_set  the ranks that take part, see runtime/process_sets.h; 0: all
inline constexpr char kProcessSetAttribute[] = "process_set: int >= 0 = 0";
inline constexpr char kMismatchAttribute[] =
    "mismatch: {'invalid_argument', 'failed_precondition'} = 'invalid_argument'";

// Completes one run of a kernel: for the engine or for TensorFlow's cancellation, whichever is
// first.
class KernelCompletion {
 public:
  KernelCompletion(tensorflow::OpKernelContext* context,
                   tensorflow::AsyncOpKernel::DoneCallback done, Code mismatch)
      : context_(context), done_(std::move(done)), mismatch_(mismatch) {}

  // Ends the kernel, once; later calls do nothing.
  void Complete(Status status);

  // Calls `use` with the context, unless the kernel has ended or ends; then with null.
  absl::Status WithContext(
      const std::function<absl::Status(tensorflow::OpKernelContext*)>& use);

  // To be called before the kernel ends, unless that is by a cancellation.
  void set_deregister(std::function<void()> deregister) { deregister_ = std::move(deregister); }

 private:
  tensorflow::OpKernelContext* const context_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  const Code mismatch_;
  std::function<void()> deregister_;
  std::mutex mutex_;  // guards complete_, and the context's use
  bool complete_ = false;
};

// The runs of the ordered ops of one stream: an eager op is one, and a call of a tf.function.
struct Runs {
  std::mutex mutex;    // guards what follows
  int unfinished = 0;  // ops
  int64_t step = 0;    // of the run that they are of; 0 for eager ones
};

// A kernel of a collective: knows the attributes that all have.
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* construction);

  // Refuses a second thread that runs an ordered op of the same stream meanwhile. An op knows the
  // thread in which its tf.function was traced, so the ranks would take one thread's tensors for the
  // other's.
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) final;

 protected:
  using Tensors = std::vector<tensorflow::Tensor>;

  // Where this rank stands among those that take part; nothing if a request would fail.
  std::optional<Topology> GroupTopology() const;

  // As ComputeAsync of other kernels.
  virtual void Start(tensorflow::OpKernelContext* context, DoneCallback done) = 0;

  // What is alike in all: who asks.
  Request NewRequest(Request::Kind kind, tensorflow::OpKernelContext* context) const;

  // That the kernel ends with the status of its request.
  std::shared_ptr<KernelCompletion> NewCompletion(tensorflow::OpKernelContext* context,
                                                  DoneCallback done) const;

  // Hands `request` to the engine, with the GPU of its tensors where this kernel runs on one.
  // `shaped` have the shapes of its tensors. `memory` holds all that they point to: it stays where
  // TensorFlow cancels the step, and with it this kernel, while the engine is at work.
  void Submit(tensorflow::OpKernelContext* context, Request request,
              const std::vector<const tensorflow::Tensor*>& shaped, std::shared_ptr<Tensors> memory,
              std::shared_ptr<KernelCompletion> completion);

  // Lets TensorFlow's cancellation call `cancel`. Returns whether that is in time, else it is not
  // called.
  static bool OnCancellation(tensorflow::OpKernelContext* context, KernelCompletion* completion,
                             const std::function<void()>& cancel);

  // Gives `request` its signature: the one of the run before if name and shapes are the same.
  void SetSignature(Request* request, const std::vector<const tensorflow::Tensor*>& shaped);

 private:
  int process_set_ = 0;
  bool ordered_ = false;
  std::string request_;
  std::string stream_;
  Code mismatch_ = Code::kInvalidArgument;
  std::mutex mutex_;  // guards what follows
  std::shared_ptr<const Signature> signature_;
  std::string signed_name_;  // of the request that has it
  Runs* runs_ = nullptr;  // of its stream
};

// Ours for TensorFlow's. Only for the types in kPlainTypes.
DType ToDType(tensorflow::DataType dtype);

// As the context's own; asks the system for huge pages where a large output is in the host's memory.
// On a virtual machine the first touch of 64 MiB in small ones takes longer than any collective.
absl::Status AllocateOutput(tensorflow::OpKernelContext* context, int index,
                            const tensorflow::TensorShape& shape, tensorflow::Tensor** output);
void AdviseHugePages(const tensorflow::OpKernelContext& context, const tensorflow::Tensor& output);

// Reads `in`, writes `out`.
TensorBuffer ToBuffer(const void* in, const tensorflow::Tensor& out);

using KernelFactory = tensorflow::OpKernel* (*)(tensorflow::OpKernelConstruction*);

// Registers a collective's kernel for GPUs if this process has a GPU's driver and NCCL, and DDL_GPU
// allows it; returns whether it did. Else TensorFlow must know of none: it would choose the GPU
// where only the host's memory will do, and without one it copies by itself. For what NCCL `adds`,
// or what it moves: of the plain types all but int32, which TensorFlow keeps in the host's memory,
// where also the inputs and outputs `on_host` stay.
bool RegisterForGpus(const char* op, bool adds, const std::vector<const char*>& on_host,
                     KernelFactory create);

template <class Kernel>
bool RegisterForGpus(const char* op, bool adds, const std::vector<const char*>& on_host = {}) {
  return RegisterForGpus(op, adds, on_host,
                         [](tensorflow::OpKernelConstruction* construction)
                             -> tensorflow::OpKernel* { return new Kernel(construction); });
}

// The value of attribute T in op definitions: all element types without pointers.
inline constexpr char kPlainTypes[] =
    "T: {float32, float64, int32, int64, float16, bfloat16, int8, uint8, int16, uint16, uint32, "
    "uint64, bool, complex64, complex128}";

// The types that can be reduced.
inline constexpr char kReducedTypes[] =
    "T: {float32, float64, int32, int64, float16, bfloat16, int8, uint8, int16, uint16, uint32, "
    "uint64}";

// How they can be.
inline constexpr char kReduceOps[] = "op: {'sum', 'avg', 'min', 'max', 'prod'}";
// Of ops that every rank has the whole result of.
inline constexpr char kAllReduceOps[] = "op: {'sum', 'avg', 'min', 'max', 'prod', 'adasum'}";

// What a value of the attribute `op` means.
void SetReduction(const std::string& op, Request* request);

}  // namespace ddl

#endif  // DDL_TF_ADAPTER_H_
