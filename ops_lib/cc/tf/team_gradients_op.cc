#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/description.h"
#include "runtime/teams.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/adapter.h"

namespace ddl {
namespace {

namespace tf = tensorflow;

REGISTER_OP("TeamGradients")
    .Input("input: N * T")
    .Output("output: N * T")
    .Attr("N: int >= 1")
    .Attr("team: int")
    .Attr("T: {float32, float64, int32, int64, float16, bfloat16}")
    .Attr(kOrderedAttribute)
    .Attr(kRequestAttribute)
    .Attr(kStreamAttribute)
    .Attr(kMismatchAttribute)
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Averages N gradients over the ranks, as the plan of a team says for this step. Collective.

In a blocking step the outputs are the averages of the inputs. In a pipelined step they are those of
the step before, zeros if there was none, and the inputs are reduced while the graph goes on. In a
transition they are a mean of both. Each op counts its own runs, by its name, in all sessions of the
process, from 1 when the team is configured.

input: N tensors of any shapes, the same on every rank.
output: As the inputs in number, shape and type.
team: Number of a team that dl_comm.config_team has configured.
ordered: As in AllReduceN; so are request, stream and mismatch.
)doc");

class TeamGradientsOp : public CollectiveKernel {
 public:
  explicit TeamGradientsOp(tf::OpKernelConstruction* construction)
      : CollectiveKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("team", &team_));
  }

  void Start(tf::OpKernelContext* context, DoneCallback done) override {
    Request request = NewRequest(Request::Kind::kAllReduce, context);
    // The engine may work on them after this step is over, and it fails alone.
    request.run = request.session = 0;
    const auto inputs = std::make_shared<std::vector<tf::Tensor>>();
    const auto outputs = std::make_shared<std::vector<tf::Tensor>>();
    for (int i = 0; i < context->num_inputs(); ++i) {
      // Taken first: forwarding moves the input's buffer to the output.
      const void* in = context->input(i).data();
      const tf::TensorShape shape = context->input(i).shape();
      const tf::DataType dtype = context->input_dtype(i);
      const std::unique_ptr<tf::Tensor> forwarded = context->forward_input(
          i, i, dtype, shape, tf::HOST_MEMORY, tf::AllocatorAttributes());
      if (forwarded != nullptr) {
        outputs->push_back(*forwarded);
      } else {
        inputs->push_back(context->input(i));
        outputs->emplace_back();
        OP_REQUIRES_OK_ASYNC(context, context->allocate_temp(dtype, shape, &outputs->back()), done);
        AdviseHugePages(*context, outputs->back());
      }
      request.tensors.push_back(ToBuffer(in, outputs->back()));
    }
    std::vector<tf::TensorShape> shapes;
    std::vector<const tf::Tensor*> shaped;
    for (const tf::Tensor& output : *outputs) {
      shapes.push_back(output.shape());
      shaped.push_back(&output);
    }
    request.average = true;
    SetSignature(&request, shaped);
    for (size_t i = 0; i < shaped.size(); ++i) {
      // Compared with those of the previous step.
      request.tensors[i].dims = request.signature->dims[i];
    }
    const std::shared_ptr<KernelCompletion> completion = NewCompletion(context, std::move(done));
    // The reduction itself goes on: the other ranks count on it, and maybe this rank's next step.
    const auto cancel = [completion, title = Title(request)] {
      completion->Complete(Status(Code::kCancelled, title + ": cancelled with its step."));
    };
    // From here on a cancellation may end the kernel, and a session that is closed then frees it.
    const int team = team_;
    if (!OnCancellation(context, completion.get(), cancel)) cancel();
    ProcessTeams().Step(team, std::move(request), inputs, outputs,
                        [completion, shapes = std::move(shapes)](const StepGradients& gradients) {
                          Status status = gradients.status;
                          if (status.ok()) {
                            const absl::Status set =
                                completion->WithContext([&](tf::OpKernelContext* context) {
                                  return SetOutputs(context, shapes, gradients);
                                });
                            if (!set.ok()) {
                              status = Status(Code::kInternal, std::string(set.message()));
                            }
                          }
                          completion->Complete(status);
                        });
  }

 private:
  static absl::Status SetOutputs(tf::OpKernelContext* context,
                                 const std::vector<tf::TensorShape>& shapes,
                                 const StepGradients& gradients) {
    if (context == nullptr) return absl::OkStatus();  // cancelled: nobody looks at them
    if (!gradients.own != !gradients.previous) {  // one of them: its tensors are the outputs
      const AsyncReduction& reduction = gradients.own ? *gradients.own : *gradients.previous;
      const auto tensors = std::static_pointer_cast<std::vector<tf::Tensor>>(reduction.outputs());
      for (size_t i = 0; i < tensors->size(); ++i) context->set_output(i, (*tensors)[i]);
      return absl::OkStatus();
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      tf::Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(AllocateOutput(context, i, shapes[i], &output));
      gradients.Write(i, output->NumElements(), ToDType(output->dtype()), output->data());
    }
    return absl::OkStatus();
  }

  int team_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("TeamGradients").Device(tf::DEVICE_CPU), TeamGradientsOp);

}  // namespace
}  // namespace ddl
