#include "runtime/engine.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("Init")
    .Input("user_gpuid: int32")
    .Output("rank: int32")
    .Output("size: int32")
    .Output("local_rank: int32")
    .Output("local_size: int32")
    .Output("local_gpuid: int32")
    .Attr("mode: string")
    .Attr("pci: bool = true")
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      tf::shape_inference::ShapeHandle scalar;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 0, &scalar));
      for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Starts communication among the ranks of an MPI job. Safe to repeat.

MPI chooses the algorithm from the hosts it runs on, so `mode`, which once described the network,
is accepted and has no effect; nor has `pci`, because GPUs are taken in the order of CUDA.

user_gpuid: Scalar. The GPU that this rank should use; negative to take the local rank's.
rank: Scalar in [0, size).
size: Scalar. Number of ranks.
local_rank: Scalar. Rank among those of this host.
local_size: Scalar. Number of ranks on this host.
local_gpuid: Scalar. The GPU of this rank.
mode: Options of the job, as in DDL_OPTIONS.
pci: Whether GPUs are ordered by PCI device number.
)doc");

class InitOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  // Not asynchronous: nothing else can run before it, and it waits for processes that mpirun has
  // already started, not for their graphs.
  void Compute(tf::OpKernelContext* context) override {
    const tf::Tensor& user_gpuid = context->input(0);
    OP_REQUIRES(context, tf::TensorShapeUtils::IsScalar(user_gpuid.shape()),
                absl::InvalidArgumentError("Init: user_gpuid must be a scalar."));
    Topology topology;
    OP_REQUIRES_OK(context, ToTensorFlow(Engine::Get().Start(&topology)));
    const int gpu = user_gpuid.scalar<int32_t>()();
    const int values[] = {topology.rank, topology.size, topology.local_rank, topology.local_size,
                          gpu >= 0 ? gpu : topology.local_rank};
    for (int i = 0; i < 5; ++i) {
      tf::Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, tf::TensorShape({}), &output));
      output->scalar<int32_t>()() = values[i];
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("Init").Device(tf::DEVICE_CPU), InitOp);

}  // namespace
}  // namespace ddl
