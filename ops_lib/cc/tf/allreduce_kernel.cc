#include "tf/allreduce_kernel.h"

#include <string>
#include <utility>
#include <vector>

#include "runtime/engine.h"

namespace ddl {

namespace tf = tensorflow;

AllReduceKernel::AllReduceKernel(tf::OpKernelConstruction* construction)
    : CollectiveKernel(construction) {
  std::string op;
  OP_REQUIRES_OK(construction, construction->GetAttr("op", &op));
  average_ = op == "avg";
  if (construction->HasAttr("mpi")) {
    OP_REQUIRES_OK(construction, construction->GetAttr("mpi", &unfused_));
    OP_REQUIRES_OK(construction, construction->GetAttr("check", &tolerance_));
    OP_REQUIRES(construction, tolerance_ >= 0 && tolerance_ <= 1,
                absl::InvalidArgumentError("AllReduceN: check must be between 0 and 1."));
    OP_REQUIRES(construction,
                construction->device_type() != tf::DEVICE_GPU || (!unfused_ && tolerance_ == 0),
                absl::InvalidArgumentError("AllReduceN: mpi and check reduce in the host's memory. "
                                           "Put the op on /CPU:0."));
  }
}

void AllReduceKernel::ComputeAsync(tf::OpKernelContext* context, DoneCallback done) {
  std::vector<TensorBuffer> tensors;
  for (int i = 0; i < context->num_inputs(); ++i) {
    // Taken first: forwarding may move the input's buffer to the output.
    const void* in = context->input(i).data();
    const tf::TensorShape shape = context->input(i).shape();
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({i}, i, shape, &output),
                         done);
    tensors.push_back(ToBuffer(in, *output));
  }
  Request request = NewRequest(Request::Kind::kAllReduce, context, std::move(done));
  request.average = average_;
  request.unfused = unfused_;
  request.tolerance = tolerance_;
  request.tensors = std::move(tensors);
  Submit(context, std::move(request));
}

}  // namespace ddl
