#include "tf/allreduce_kernel.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine.h"

namespace ddl {

namespace tf = tensorflow;

namespace {

// Whether runtime/fused_allreduce can ask MPI for a sum of them.
bool HasBaseline(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kFloat16:
    case DType::kBfloat16: return true;
    default: return false;
  }
}

}  // namespace

AllReduceKernel::AllReduceKernel(tf::OpKernelConstruction* construction)
    : CollectiveKernel(construction) {
  OP_REQUIRES_OK(construction, construction->GetAttr("op", &op_));
  first_ = construction->num_inputs() - construction->num_outputs();
  if (construction->HasAttr("mpi")) {
    OP_REQUIRES_OK(construction, construction->GetAttr("mpi", &unfused_));
    OP_REQUIRES_OK(construction, construction->GetAttr("check", &tolerance_));
    OP_REQUIRES(construction, tolerance_ >= 0 && tolerance_ <= 1,
                absl::InvalidArgumentError("AllReduceN: check must be between 0 and 1."));
    Request request;
    SetReduction(op_, &request);
    OP_REQUIRES(construction,
                (!unfused_ && tolerance_ == 0) ||
                    (request.op == ReduceOp::kSum && !request.adasum &&
                     HasBaseline(ToDType(output_type(0)))),
                absl::InvalidArgumentError(
                    "AllReduceN: mpi and check are for sums and averages of float16, bfloat16, "
                    "float32, float64, int32 and int64. Leave them out."));
    OP_REQUIRES(construction,
                construction->device_type() != tf::DEVICE_GPU || (!unfused_ && tolerance_ == 0),
                absl::InvalidArgumentError("AllReduceN: mpi and check reduce in the host's memory. "
                                           "Put the op on /CPU:0."));
  }
}

void AllReduceKernel::Start(tf::OpKernelContext* context, DoneCallback done) {
  Request request = NewRequest(Request::Kind::kAllReduce, context);
  std::vector<const tf::Tensor*> outputs;
  const auto memory = std::make_shared<Tensors>();
  for (int i = 0; i < context->num_outputs(); ++i) {
    // Taken first: forwarding may move the input's buffer to the output.
    const int input = i + first_;
    const void* in = context->input(input).data();
    const tf::TensorShape shape = context->input(input).shape();
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, context->forward_input_or_allocate_output({input}, i, shape, &output), done);
    if (output->data() != in) {
      memory->push_back(context->input(input));
      AdviseHugePages(*context, *output);
    }
    memory->push_back(*output);
    outputs.push_back(output);
    request.tensors.push_back(ToBuffer(in, *output));
  }
  if (first_ > 0) {
    bool scalars = first_ <= 2;
    for (int i = 0; i < first_; ++i) {
      scalars = scalars && tf::TensorShapeUtils::IsScalar(context->input(i).shape());
    }
    OP_REQUIRES_ASYNC(
        context, scalars,
        absl::InvalidArgumentError("AllReduceAtStep: step and rate must be scalars."), done);
    request.step = std::max<int64_t>(0, context->input(0).scalar<int64_t>()());
    if (first_ > 1) request.rate = context->input(1).scalar<float>()();
  }
  SetReduction(op_, &request);
  request.unfused = unfused_;
  request.tolerance = tolerance_;
  Submit(context, std::move(request), outputs, memory, NewCompletion(context, std::move(done)));
}

}  // namespace ddl
