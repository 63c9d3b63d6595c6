#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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
    .Attr("root: int >= 0 = 0")
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .Attr(kProcessSetAttribute)
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnchangedShape)
    .Doc(R"doc(
Gives every rank the value of one of them. Collective.

Fails with InvalidArgument on every rank if shape, dtype or root differ, or if there is no such rank.

input: Any shape; its values matter on the root only.
output: The input of the root.
root: A rank.
ordered: All ranks reach this op at the same place among the ordered collectives of its stream, so a
  difference is an error at once. Else the ranks know it by its name and agree whose turn it is.
request: The name by which the ranks know it; empty: that of the op.
stream: The thread that keeps the order; empty: the main thread.
mismatch: The error where ranks differ.
process_set: The ranks that take part, see ddl_ops.process_sets; 0: all.
)doc");

REGISTER_OP("BcastN")
    .Input("input: N * T")
    .Output("output: N * T")
    .Attr("N: int >= 1")
    .Attr(kPlainTypes)
    .Attr("root: int >= 0 = 0")
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
Gives every rank the values of one of them, of N tensors in one go. Collective.

Fails with InvalidArgument on every rank if the number of tensors, a shape, the dtype or the root
differ, or if there is no such rank.

input: N tensors as in Bcast.
output: Those of the root.
root: A rank.
ordered: As in Bcast; so are request, stream, mismatch and process_set.
)doc");

class BcastOp : public CollectiveKernel {
 public:
  explicit BcastOp(tf::OpKernelConstruction* construction) : CollectiveKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
  }

  void Start(tf::OpKernelContext* context, DoneCallback done) override {
    const std::optional<Topology> topology = GroupTopology();
    OP_REQUIRES_ASYNC(context, !topology || root_ < topology->size,
                      absl::InvalidArgumentError(type_string() + " \"" + name() +
                                                 "\": there is no rank " + std::to_string(root_) +
                                                 " among " + std::to_string(topology->size) +
                                                 " ranks."),
                      done);
    Request request = NewRequest(Request::Kind::kBroadcast, context);
    request.root = root_;
    const auto memory = std::make_shared<Tensors>();
    std::vector<const tf::Tensor*> outputs;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const tf::Tensor& input = context->input(i);
      tf::Tensor* output = nullptr;
      // The root sends from its input, the others receive into a buffer of their own.
      if (topology && topology->rank == root_) {
        context->set_output(i, input);
        output = context->mutable_output(i);
      } else {
        OP_REQUIRES_OK_ASYNC(context, AllocateOutput(context, i, input.shape(), &output), done);
      }
      memory->push_back(input);
      memory->push_back(*output);
      outputs.push_back(output);
      request.tensors.push_back(ToBuffer(input.data(), *output));
    }
    Submit(context, std::move(request), outputs, memory, NewCompletion(context, std::move(done)));
  }

 private:
  int root_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Bcast").Device(tf::DEVICE_CPU), BcastOp);
REGISTER_KERNEL_BUILDER(Name("BcastN").Device(tf::DEVICE_CPU), BcastOp);
[[maybe_unused]] const bool bcast_on_gpus = RegisterForGpus<BcastOp>("Bcast", /*adds=*/false);

}  // namespace
}  // namespace ddl
