#ifndef DDL_TF_ADAPTER_H_
#define DDL_TF_ADAPTER_H_

#include "core/dtype.h"
#include "core/status.h"
#include "runtime/request.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace ddl {

// The TensorFlow error type of each Code: InvalidArgument, FailedPrecondition, DeadlineExceeded,
// Aborted, Internal.
absl::Status ToTensorFlow(const Status& status);

// The attribute of every collective that says whether something above the ops keeps its order.
inline constexpr char kOrderedAttribute[] = "ordered: bool = false";

// A kernel of a collective: knows the attribute `ordered`.
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* construction);

 protected:
  // What is alike in all: who asks, and that `done` ends the kernel with the request's status.
  Request NewRequest(Request::Kind kind, tensorflow::OpKernelContext* context, DoneCallback done);

 private:
  bool ordered_ = false;
};

// Ours for TensorFlow's. Only for the types in kPlainTypes.
DType ToDType(tensorflow::DataType dtype);

// Reads `in`, writes `out`; both outlive the request because the kernel's context holds them.
TensorBuffer ToBuffer(const void* in, const tensorflow::Tensor& out);

// Hands `request` to the engine, with the place of its tensors where the kernel of `context` runs
// on a GPU. All outputs but those of `request.allocate` are allocated.
void Submit(tensorflow::OpKernelContext* context, Request request);

using KernelFactory = tensorflow::OpKernel* (*)(tensorflow::OpKernelConstruction*);

// Registers a collective's kernel for GPUs if this process has a GPU's driver and NCCL, and DDL_GPU
// allows it; returns whether it did. Else TensorFlow must know of none: it would choose the GPU
// where only the host's memory will do, and without one it copies by itself. For what NCCL `adds`,
// or what it moves: of the plain types all but int32, which TensorFlow keeps in the host's memory,
// where also the output `on_host` stays.
bool RegisterForGpus(const char* op, bool adds, const char* on_host, KernelFactory create);

template <class Kernel>
bool RegisterForGpus(const char* op, bool adds, const char* on_host = nullptr) {
  return RegisterForGpus(op, adds, on_host,
                         [](tensorflow::OpKernelConstruction* construction)
                             -> tensorflow::OpKernel* { return new Kernel(construction); });
}

// The value of attribute T in op definitions: all element types without pointers.
inline constexpr char kPlainTypes[] =
    "T: {float32, float64, int32, int64, float16, bfloat16, int8, uint8, int16, uint16, uint32, "
    "uint64, bool, complex64, complex128}";

// The types that can be summed.
inline constexpr char kReducedTypes[] =
    "T: {float32, float64, int32, int64, float16, bfloat16}";

}  // namespace ddl

#endif  // DDL_TF_ADAPTER_H_
