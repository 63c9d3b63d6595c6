#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/adapter.h"
#include "tf/allreduce_kernel.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("AllReduceN")
    .Input("input: N * T")
    .Output("output: N * T")
    .Attr("N: int >= 1")
    .Attr(kAllReduceOps)
    .Attr(kReducedTypes)
    .Attr("mpi: bool = false")
    .Attr("check: float = 0.0")
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reduces N tensors over the ranks in one go. Collective.

Small tensors share a reduction, large ones are cut into pieces. The results have the same
bits on every rank. Fails with InvalidArgument on every rank if the number of tensors, a shape, the
dtype or an attribute differ.

input: N tensors of any shapes, the same on every rank.
output: For each input the sum over the ranks; for avg divided once by their number, integers
  toward zero; or the product, or the smallest or largest, NaN where a rank has a NaN. Integers wrap
  around, but for averages of up to 32 bits, which are added in 64. float16 and bfloat16 are
  summed, multiplied and divided as float32 and rounded once, or twice where several hosts have
  several ranks each. On a GPU NCCL adds, in its own way.
mpi: One MPI_Allreduce for each tensor as it is, without fusion or pieces: the baseline.
check: Between 0 and 1. If positive, also reduces as `mpi` does and fails with Internal if an
  element differs by more than check * max(1, |element|). Both are for sums and averages of real
  floating-point numbers, int32 and int64.
ordered: All ranks reach this op at the same place among the ordered collectives of its stream, so a
  difference is an error at once. Else the ranks know it by its name and agree whose turn it is.
request: The name by which the ranks know it; empty: that of the op.
stream: The thread that keeps the order; empty: the main thread.
mismatch: The error where ranks differ.
process_set: The ranks that take part, see ddl_ops.process_sets; 0: all.
)doc");

REGISTER_KERNEL_BUILDER(Name("AllReduceN").Device(tf::DEVICE_CPU), AllReduceKernel);
[[maybe_unused]] const bool allreduce_n_on_gpus =
    RegisterForGpus<AllReduceKernel>("AllReduceN", /*adds=*/true);

}  // namespace
}  // namespace ddl
