#include "runtime/engine.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("Bcast")
    .Input("input: T")
    .Output("output: T")
    .Attr(kPlainTypes)
    .Attr(kOrderedAttribute)
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnchangedShape)
    .Doc(R"doc(
Gives every rank the value of rank 0. Collective.

Fails with InvalidArgument on every rank if shape or dtype differ.

input: Any shape; its values matter on rank 0 only.
output: The input of rank 0.
ordered: All ranks reach this op at the same place among the ordered collectives, so a difference
  is an error at once. Else the ranks know it by its name and agree whose turn it is.
)doc");

class BcastOp : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const tf::Tensor& input = context->input(0);
    Topology topology;
    tf::Tensor* output = nullptr;
    // The root sends from its input, the others receive into a buffer of their own.
    if (Engine::Get().Started(&topology) && topology.rank == 0) {
      context->set_output(0, input);
      output = context->mutable_output(0);
    } else {
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, input.shape(), &output), done);
    }
    Request request = NewRequest(Request::Kind::kBroadcast, context, std::move(done));
    request.tensors.push_back(ToBuffer(input.data(), *output));
    Submit(context, std::move(request));
  }
};

REGISTER_KERNEL_BUILDER(Name("Bcast").Device(tf::DEVICE_CPU), BcastOp);
[[maybe_unused]] const bool on_gpus = RegisterForGpus<BcastOp>("Bcast", /*adds=*/false);

}  // namespace
}  // namespace ddl
