#include "runtime/engine.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

// Named with a prefix: TensorFlow has ops Size and Rank, of tensors. Not stateful: the value never
// changes, so TensorFlow need not keep them in order with the collectives.
REGISTER_OP("DdlSize").Output("size: int32").SetShapeFn(tf::shape_inference::ScalarShape).Doc(R"doc(
The number of ranks. Not collective. Fails with FailedPrecondition before Init.

size: Scalar.
)doc");

REGISTER_OP("DdlRank").Output("rank: int32").SetShapeFn(tf::shape_inference::ScalarShape).Doc(R"doc(
This process's number among all ranks. Not collective. Fails with FailedPrecondition before Init.

rank: Scalar in [0, size).
)doc");

REGISTER_OP("DdlLocalRank")
    .Output("local_rank: int32")
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc(R"doc(
This process's number among the ranks of its host. Not collective. Fails with FailedPrecondition
before Init.

local_rank: Scalar in [0, local_size).
)doc");

template <int Topology::*kField>
class TopologyOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* context) override {
    Topology topology;
    OP_REQUIRES(context, Engine::Get().Started(&topology),
                absl::FailedPreconditionError(
                    type_string() + ": ddl is not running. Call ddl.init (op Init) first."));
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tf::TensorShape({}), &output));
    output->scalar<int32_t>()() = topology.*kField;
  }
};

REGISTER_KERNEL_BUILDER(Name("DdlSize").Device(tf::DEVICE_CPU), TopologyOp<&Topology::size>);
REGISTER_KERNEL_BUILDER(Name("DdlRank").Device(tf::DEVICE_CPU), TopologyOp<&Topology::rank>);
REGISTER_KERNEL_BUILDER(Name("DdlLocalRank").Device(tf::DEVICE_CPU),
                        TopologyOp<&Topology::local_rank>);

}  // namespace
}  // namespace ddl
