#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("DdlAllToAll")
    .Input("input: T")
    .Input("splits: int64")
    .Output("output: T")
    .Output("received_splits: int64")
    .Attr(kPlainTypes)
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      tf::shape_inference::ShapeHandle input, splits, output;
      TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &input));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 1, &splits));
      TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
      context->set_output(0, output);
      context->set_output(1, context->Vector(context->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sends rows of a tensor to each rank, and joins what comes from each. Collective.

Fails with InvalidArgument on every rank if the dtype or a dimension other than the first differs, if
the tensors are scalars, or if the splits of a rank do not fit its tensor.

input: [n_r, d...]; n_r may differ by rank and may be 0, d may not differ.
splits: [number of ranks]; how many rows, from the first on, go to each rank. Or [0]: equally many.
output: [sum received_splits, d...], in the order of the ranks.
received_splits: [number of ranks]; how many rows have come from each.
ordered: All ranks reach this op at the same place among the ordered collectives of its stream, so a
  difference is an error at once. Else the ranks know it by its name and agree whose turn it is.
request: The name by which the ranks know it; empty: that of the op.
stream: The thread that keeps the order; empty: the main thread.
mismatch: The error where ranks differ in dtype or dimensions.
process_set: The ranks that take part, see ddl_ops.process_sets; 0: all.
)doc");

// Allocates both outputs, in the context unless that has ended, and keeps the first.
absl::Status AllocateOutputs(tf::OpKernelContext* context, const std::vector<int64_t>& received,
                             std::vector<tf::Tensor>* memory) {
  const tf::Tensor input = memory->front();
  tf::TensorShape shape = input.shape();
  TF_RETURN_IF_ERROR(
      shape.SetDimWithStatus(0, std::accumulate(received.begin(), received.end(), int64_t{0})));
  if (context == nullptr) {
    memory->emplace_back(input.dtype(), shape);
    return absl::OkStatus();
  }
  tf::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(context, 0, shape, &output));
  memory->push_back(*output);
  tf::Tensor* splits = nullptr;
  const tf::TensorShape ranks({static_cast<int64_t>(received.size())});
  TF_RETURN_IF_ERROR(context->allocate_output(1, ranks, &splits));
  std::copy(received.begin(), received.end(), splits->vec<int64_t>().data());
  return absl::OkStatus();
}

class AllToAllOp : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void Start(tf::OpKernelContext* context, DoneCallback done) override {
    const tf::Tensor& input = context->input(0);
    const auto splits = context->input(1).flat<int64_t>();
    Request request = NewRequest(Request::Kind::kAllToAll, context);
    request.tensors.push_back(ToBuffer(input.data(), input));
    request.tensors[0].out = nullptr;
    request.splits.assign(splits.data(), splits.data() + splits.size());
    const auto memory = std::make_shared<Tensors>(Tensors{input});
    const std::shared_ptr<KernelCompletion> completion = NewCompletion(context, std::move(done));
    request.allocate = [memory, completion](const std::vector<int64_t>& received, void** outs) {
      const absl::Status status = completion->WithContext(
          [&](tf::OpKernelContext* open) { return AllocateOutputs(open, received, memory.get()); });
      if (!status.ok()) return Status(Code::kInternal, std::string(status.message()));
      outs[0] = memory->back().data();
      return Status();
    };
    Submit(context, std::move(request), {&input}, memory, completion);
  }
};

REGISTER_KERNEL_BUILDER(Name("DdlAllToAll").Device(tf::DEVICE_CPU), AllToAllOp);

}  // namespace
}  // namespace ddl
