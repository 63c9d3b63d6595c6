#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/range.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("ReduceScatterN")
    .Input("input: N * T")
    .Output("output: N * T")
    .Attr("N: int >= 1")
    .Attr(kReduceOps)
    .Attr(kReducedTypes)
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_inputs(); ++i) {
        tf::shape_inference::ShapeHandle input, output;
        TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(i), 1, &input));
        TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
        context->set_output(i, output);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reduces N tensors over the ranks in one go, and gives each rank its rows of them. Collective.

Fails with InvalidArgument on every rank if the number of tensors, a shape, the dtype or the op
differ, or if a tensor is a scalar.

input: N tensors [n, d...] of any shapes, the same on every rank.
output: For each input [n / ranks, d...], one row more on each of the first n % ranks ranks: the rows
  of the reduction, as AllReduceN has it, in the order of the ranks.
ordered: All ranks reach this op at the same place among the ordered collectives of its stream, so a
  difference is an error at once. Else the ranks know it by its name and agree whose turn it is.
request: The name by which the ranks know it; empty: that of the op.
stream: The thread that keeps the order; empty: the main thread.
mismatch: The error where ranks differ.
process_set: The ranks that take part, see ddl_ops.process_sets; 0: all.
)doc");

class ReduceScatterOp : public CollectiveKernel {
 public:
  explicit ReduceScatterOp(tf::OpKernelConstruction* construction)
      : CollectiveKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("op", &op_));
  }

  void Start(tf::OpKernelContext* context, DoneCallback done) override {
    const Topology topology = GroupTopology().value_or(Topology());
    Request request = NewRequest(Request::Kind::kReduceScatter, context);
    SetReduction(op_, &request);
    const auto memory = std::make_shared<Tensors>();
    std::vector<const tf::Tensor*> inputs;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tf::Tensor& input = context->input(i);
      tf::TensorShape shape = input.shape();
      if (shape.dims() > 0) {  // a scalar is an error, which the ranks must have in common
        shape.set_dim(0, EqualPart(shape.dim_size(0), topology.size, topology.rank).count());
      }
      tf::Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(context, AllocateOutput(context, i, shape, &output), done);
      memory->push_back(input);
      memory->push_back(*output);
      inputs.push_back(&input);
      request.tensors.push_back(ToBuffer(input.data(), input));
      request.tensors.back().out = output->data();
    }
    Submit(context, std::move(request), inputs, memory, NewCompletion(context, std::move(done)));
  }

 private:
  std::string op_;
};

REGISTER_KERNEL_BUILDER(Name("ReduceScatterN").Device(tf::DEVICE_CPU), ReduceScatterOp);

}  // namespace
}  // namespace ddl
