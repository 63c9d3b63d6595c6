#ifndef DDL_RUNTIME_FUSED_ALLREDUCE_H_
#define DDL_RUNTIME_FUSED_ALLREDUCE_H_

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "runtime/agreement.h"
#include "runtime/request.h"

namespace ddl {

// Reduces the tensors of one request: small ones are laid side by side in a buffer of a few MiB and
// share a reduction, large ones are reduced where they lie. What shares a buffer depends on the
// shapes alone, so every bit of the result is the same on all ranks and in every run.
//
// float16 and bfloat16 are added and divided in float32 and rounded once, at the end. MPI_Allreduce
// does not know them, so in the baseline they travel as float32.
class FusedAllReduce {
 public:
  // `communicator` must outlive this object.
  explicit FusedAllReduce(Communicator* communicator) : communicator_(communicator) {}

  // Whether the request is so small that it goes with the agreement: then `tensor` holds all of it,
  // and once it is summed, Unpack fills every `out`; if it fails, Forget. Else Run does the work.
  bool Pack(const Request& request, SmallTensor* tensor);
  void Unpack(const Request& request);
  void Forget();

  // Fills every `out`. Internal if the request asks for a check and the result deviates.
  Status Run(const Request& request);

 private:
  Status RunFused(const Request& request);
  Status RunUnfused(const Request& request);
  Status RunChecked(const Request& request);
  Status Reduce(const Request& request, const void* in, void* out, int64_t count);
  Status ReduceBaseline(const Request& request, const void* in, void* out, int64_t count);
  int Divisor(const Request& request) const;
  void Append(const TensorBuffer& tensor, int64_t nbytes);
  Status Flush(const Request& request);

  Communicator* communicator_;
  std::vector<char> buffer_;
  std::vector<const TensorBuffer*> packed_;  // what lies in buffer_, in order
  int64_t packed_nbytes_ = 0;
  std::vector<float> wide_;  // halves of the baseline
};

}  // namespace ddl

#endif  // DDL_RUNTIME_FUSED_ALLREDUCE_H_
