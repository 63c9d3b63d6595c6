#include "runtime/process_sets.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/adapter.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

// Named with a prefix: TensorFlow has ops Size and Rank, of tensors. Not stateful: the value never
// changes, so TensorFlow need not keep them in order with the collectives.
REGISTER_OP("DdlSize")
    .Output("size: int32")
    .Attr(kProcessSetAttribute)
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc(R"doc(
The number of ranks, of all or of a process set. Not collective. Fails with FailedPrecondition before
Init.

size: Scalar.
)doc");

REGISTER_OP("DdlRank")
    .Output("rank: int32")
    .Attr(kProcessSetAttribute)
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc(R"doc(
This process's number among all ranks, or those of a process set. Not collective. Fails with
FailedPrecondition before Init.

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
  explicit TopologyOp(tf::OpKernelConstruction* construction) : OpKernel(construction) {
    if (construction->HasAttr("process_set")) {
      OP_REQUIRES_OK(construction, construction->GetAttr("process_set", &process_set_));
    }
  }

  void Compute(tf::OpKernelContext* context) override {
    Topology topology;
    Engine* engine = nullptr;
    const Status found = ProcessSets::Get().Find(process_set_, &engine);
    OP_REQUIRES(context, found.ok(),
                ToTensorFlow(Status(found.code(), type_string() + ": " + found.message())));
    OP_REQUIRES(context, engine->Started(&topology),
                absl::FailedPreconditionError(
                    type_string() + ": ddl is not running. Call ddl.init (op Init) first."));
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tf::TensorShape({}), &output));
    output->scalar<int32_t>()() = topology.*kField;
  }

 private:
  int process_set_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("DdlSize").Device(tf::DEVICE_CPU), TopologyOp<&Topology::size>);
REGISTER_KERNEL_BUILDER(Name("DdlRank").Device(tf::DEVICE_CPU), TopologyOp<&Topology::rank>);
REGISTER_KERNEL_BUILDER(Name("DdlLocalRank").Device(tf::DEVICE_CPU),
                        TopologyOp<&Topology::local_rank>);

}  // namespace
}  // namespace ddl
