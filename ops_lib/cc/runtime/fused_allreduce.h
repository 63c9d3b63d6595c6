#ifndef DDL_RUNTIME_FUSED_ALLREDUCE_H_
#define DDL_RUNTIME_FUSED_ALLREDUCE_H_

#include <cstdint>
#include <vector>

#include "comm/adasum.h"
#include "comm/communicator.h"
#include "runtime/request.h"

namespace ddl {

// Reduces the tensors of one request as one, by Adasum, or by the baseline.
//
// float16 and bfloat16 are added and divided in float32 and rounded once, at the end (twice where
// several hosts have several ranks each). MPI_Allreduce
// does not know them, so in the baseline they travel as float32, and averages of int32 as int64.
class FusedAllReduce {
 public:
  // `communicator` must outlive this object.
  explicit FusedAllReduce(Communicator* communicator)
      : communicator_(communicator), adasum_(communicator) {}

  // Fills every `out`. InvalidInput as Adasum::Run. Internal if the request asks for a check and the result deviates.
  Status Run(const Request& request);

 private:
  Status RunFused(const Request& request);
  Status RunUnfused(const Request& request);
  Status RunChecked(const Request& request);
  Status ReduceBaseline(const Request& request, const void* in, void* out, int64_t count);

  Communicator* communicator_;
  Adasum adasum_;
  std::vector<float> wide_;  // halves of the baseline
};

}  // namespace ddl

#endif  // DDL_RUNTIME_FUSED_ALLREDUCE_H_
