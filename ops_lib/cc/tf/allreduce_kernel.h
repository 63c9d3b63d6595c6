#ifndef DDL_TF_ALLREDUCE_KERNEL_H_
#define DDL_TF_ALLREDUCE_KERNEL_H_

#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tf/adapter.h"

namespace ddl {

// Reduces each input over the ranks into the output of the same index. Serves AllReduce (one tensor),
// AllReduceN, which has the attributes `mpi` and `check` besides, and AllReduceAtStep, whose first
// inputs are the step of the training and, perhaps, the learning rate.
class AllReduceKernel : public CollectiveKernel {
 public:
  explicit AllReduceKernel(tensorflow::OpKernelConstruction* construction);
  void Start(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  int first_ = 0;  // input that is reduced
  std::string op_;
  bool unfused_ = false;
  float tolerance_ = 0;
};

}  // namespace ddl

#endif  // DDL_TF_ALLREDUCE_KERNEL_H_
