#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tf/adapter.h"
#include "tf/allreduce_kernel.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("AllReduce")
    .Input("input: T")
    .Output("output: T")
    .Attr(kAllReduceOps)
    .Attr(kReducedTypes)
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnchangedShape)
    .Doc(R"doc(
Reduces a tensor over the ranks. Collective.

The result has the same bits on every rank. Fails with InvalidArgument on every rank if shape,
dtype or op differ.

input: Any shape, the same on every rank.
output: The sum over the ranks; for avg divided once by their number, integers toward zero; or the
  product, or the smallest or largest, NaN where a rank has a NaN. Integers wrap around, but
  for averages of up to 32 bits, which are added in 64.
  float16 and bfloat16 are summed, multiplied and divided as float32 and rounded once, or twice where several
  hosts have several ranks each. adasum, of floating-point tensors on a power of two of ranks, adds what is
  orthogonal and averages what is parallel (comm/adasum.h). On a GPU
  NCCL adds, in its own way.
ordered: All ranks reach this op at the same place among the ordered collectives of its stream, so a
  difference is an error at once. Else the ranks know it by its name and agree whose turn it is.
request: The name by which the ranks know it; empty: that of the op.
stream: The thread that keeps the order; empty: the main thread.
mismatch: The error where ranks differ.
process_set: The ranks that take part, see ddl_ops.process_sets; 0: all.
)doc");

REGISTER_KERNEL_BUILDER(Name("AllReduce").Device(tf::DEVICE_CPU), AllReduceKernel);
[[maybe_unused]] const bool allreduce_on_gpus =
    RegisterForGpus<AllReduceKernel>("AllReduce", /*adds=*/true);

}  // namespace
}  // namespace ddl
