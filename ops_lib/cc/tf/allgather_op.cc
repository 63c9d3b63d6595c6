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
    .Attr(kProcessSetAttribute)
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
process_set: The ranks that take part, see ddl_ops.process_sets; 0: all.
)doc");

REGISTER_OP("AllGatherN")
    .Input("input: N * T")
    .Output("output: N * T")
    .Output("sizes: int64")
    .Attr("N: int >= 1")
    .Attr(kPlainTypes)
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      const int count = context->num_inputs();
      for (int i = 0; i < count; ++i) {
        tf::shape_inference::ShapeHandle input, output;
        TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(i), 1, &input));
        TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
        context->set_output(i, output);
      }
      context->set_output(count, context->Matrix(count, context->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Joins each of N tensors of all ranks along the first dimension, all in one go. Collective.

Fails with InvalidArgument on every rank if the number of tensors, the dtype or a dimension other
than the first differs, or if a tensor is a scalar.

input: N tensors as in AllGather.
output: Each of them as in AllGather.
sizes: [N, number of ranks]; the first dimension of each tensor of each rank.
ordered: As in AllGather; so are request, stream, mismatch and process_set.
)doc");

// Allocates all outputs, in the context unless that has ended, and keeps those of tensors behind
// the inputs, which are in `memory`.
absl::Status AllocateGathered(tf::OpKernelContext* context, const std::vector<int64_t>& sizes,
                              std::vector<tf::Tensor>* memory) {
  const int count = static_cast<int>(memory->size());
  const int64_t ranks = static_cast<int64_t>(sizes.size()) / count;
  for (int i = 0; i < count; ++i) {
    const tf::Tensor input = (*memory)[i];
    const auto first = sizes.begin() + i * ranks;
    tf::TensorShape shape = input.shape();
    TF_RETURN_IF_ERROR(
        shape.SetDimWithStatus(0, std::accumulate(first, first + ranks, int64_t{0})));
    if (context == nullptr) {
      memory->emplace_back(input.dtype(), shape);
      continue;
    }
    tf::Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(context, i, shape, &output));
    memory->push_back(*output);
  }
  if (context == nullptr) return absl::OkStatus();
  tf::TensorShape shape({ranks});
  if (context->op_kernel().type_string() == "AllGatherN") shape.InsertDim(0, count);
  tf::Tensor* sizes_output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(count, shape, &sizes_output));
  std::copy(sizes.begin(), sizes.end(), sizes_output->flat<int64_t>().data());
  return absl::OkStatus();
}

class AllGatherOp : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void Start(tf::OpKernelContext* context, DoneCallback done) override {
    Request request = NewRequest(Request::Kind::kAllGather, context);
    const auto memory = std::make_shared<Tensors>();
    std::vector<const tf::Tensor*> inputs;
    for (int i = 0; i < context->num_inputs(); ++i) {
      inputs.push_back(&context->input(i));
      memory->push_back(*inputs.back());
      request.tensors.push_back(ToBuffer(inputs.back()->data(), *inputs.back()));
      request.tensors.back().out = nullptr;
    }
    const std::shared_ptr<KernelCompletion> completion = NewCompletion(context, std::move(done));
    request.allocate = [memory, completion](const std::vector<int64_t>& sizes, void** outs) {
      const absl::Status status = completion->WithContext(
          [&](tf::OpKernelContext* open) { return AllocateGathered(open, sizes, memory.get()); });
      if (!status.ok()) return Status(Code::kInternal, std::string(status.message()));
      const size_t count = memory->size() / 2;  // behind as many inputs
      for (size_t i = 0; i < count; ++i) outs[i] = (*memory)[count + i].data();
      return Status();
    };
    Submit(context, std::move(request), inputs, memory, completion);
  }
};

REGISTER_KERNEL_BUILDER(Name("AllGather").Device(tf::DEVICE_CPU), AllGatherOp);
REGISTER_KERNEL_BUILDER(Name("AllGatherN").Device(tf::DEVICE_CPU), AllGatherOp);
[[maybe_unused]] const bool allgather_on_gpus =
    RegisterForGpus<AllGatherOp>("AllGather", /*adds=*/false, /*on_host=*/{"sizes"});

}  // namespace
}  // namespace ddl
