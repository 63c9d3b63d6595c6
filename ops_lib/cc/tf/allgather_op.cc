#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("AllGather")
    .Input("input: T")
    .Output("output: T")
    .Output("sizes: int64")
    .Attr(kPlainTypes)
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      tf::shape_inference::ShapeHandle input, output;
      TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &input));
      TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
      context->set_output(0, output);
      context->set_output(1, context->Vector(context->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Joins the tensors of all ranks along the first dimension. Collective.

Fails with InvalidArgument on every rank if the dtype or a dimension other than the first differs,
or if the tensors are scalars.

input: [n_r, d...]; n_r may differ by rank and may be 0, d may not differ.
output: [sum n_r, d...], in the order of the ranks.
sizes: [number of ranks]; n_r of each rank.
ordered: All ranks reach this op at the same place among the ordered collectives of its stream, so a
  difference is an error at once. Else the ranks know it by its name and agree whose turn it is.
request: The name by which the ranks know it; empty: that of the op.
stream: The thread that keeps the order; empty: the main thread.
mismatch: The error where ranks differ.
)doc");

// Allocates both outputs of AllGather, in the context unless that has ended, and keeps the first.
absl::Status AllocateOutputs(tf::OpKernelContext* context, const std::vector<int64_t>& sizes,
                             std::vector<tf::Tensor>* memory) {
  const tf::Tensor input = memory->front();
  const int64_t size = static_cast<int64_t>(sizes.size());
  tf::TensorShape shape = input.shape();
  TF_RETURN_IF_ERROR(
      shape.SetDimWithStatus(0, std::accumulate(sizes.begin(), sizes.end(), int64_t{0})));
  if (context == nullptr) {
    memory->emplace_back(input.dtype(), shape);
    return absl::OkStatus();
  }
  tf::Tensor* sizes_output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(1, tf::TensorShape({size}), &sizes_output));
  std::copy(sizes.begin(), sizes.end(), sizes_output->vec<int64_t>().data());
  tf::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &output));
  memory->push_back(*output);
  return absl::OkStatus();
}

class AllGatherOp : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void Start(tf::OpKernelContext* context, DoneCallback done) override {
    const tf::Tensor& input = context->input(0);
    Request request = NewRequest(Request::Kind::kAllGather, context);
    request.tensors.push_back(ToBuffer(input.data(), input));
    request.tensors[0].out = nullptr;
    const auto memory = std::make_shared<Tensors>(Tensors{input});
    const std::shared_ptr<KernelCompletion> completion = NewCompletion(context, std::move(done));
    request.allocate = [memory, completion](const std::vector<int64_t>& sizes, void** out) {
      const absl::Status status = completion->WithContext(
          [&](tf::OpKernelContext* open) { return AllocateOutputs(open, sizes, memory.get()); });
      if (!status.ok()) return Status(Code::kInternal, std::string(status.message()));
      *out = memory->back().data();
      return Status();
    };
    Submit(context, std::move(request), {&input}, memory, completion);
  }
};

REGISTER_KERNEL_BUILDER(Name("AllGather").Device(tf::DEVICE_CPU), AllGatherOp);
[[maybe_unused]] const bool on_gpus =
    RegisterForGpus<AllGatherOp>("AllGather", /*adds=*/false, /*on_host=*/"sizes");

}  // namespace
}  // namespace ddl
