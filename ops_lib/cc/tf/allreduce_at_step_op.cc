#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/adapter.h"
#include "tf/allreduce_kernel.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("AllReduceAtStep")
    .Input("step: int64")
    .Input("rate: R * float32")
    .Input("input: N * T")
    .Output("output: N * T")
    .Attr("R: int >= 0")
    .Attr("N: int >= 1")
    .Attr(kAllReduceOps)
    .Attr(kReducedTypes)
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      tf::shape_inference::ShapeHandle scalar;
      const int first = context->num_inputs() - context->num_outputs();
      for (int i = 0; i < first; ++i) {
        TF_RETURN_IF_ERROR(context->WithRank(context->input(i), 0, &scalar));
      }
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->input(i + first));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
AllReduceN for gradients: the ranks also compare the step of the training and the learning rate.
Collective.

A rank that has skipped or repeated a step by itself is an error (InvalidArgument on every rank) and
not an average of different steps; so is one that learns at another rate, whose weights would drift
apart. For all else see AllReduceN.

step: Scalar, not negative, the same on every rank.
rate: The learning rate, scalar, the same on every rank but for its last bits; or none.
input: N tensors of any shapes, the same on every rank.
output: For each input the reduction over the ranks.
ordered: As in AllReduceN; so are request, stream and mismatch.
)doc");

REGISTER_KERNEL_BUILDER(Name("AllReduceAtStep").Device(tf::DEVICE_CPU), AllReduceKernel);
[[maybe_unused]] const bool allreduce_at_step_on_gpus =
    RegisterForGpus<AllReduceKernel>("AllReduceAtStep", /*adds=*/true, /*on_host=*/{"step", "rate"});

}  // namespace
}  // namespace ddl
