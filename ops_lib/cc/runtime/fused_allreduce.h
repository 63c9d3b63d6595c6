#ifndef DDL_RUNTIME_FUSED_ALLREDUCE_H_
#define DDL_RUNTIME_FUSED_ALLREDUCE_H_

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "runtime/request.h"

namespace ddl {

// Reduces the tensors of one request in pieces of a few MiB: small tensors are laid side by side
// in one buffer and share a message, large ones are cut. A piece stays in the cache between the
// copy, the reduction and the division. The cut depends on the shapes alone, so the order of
// additions, and with it every bit of the result, is the same on all ranks and in every run.
//
// float16 and bfloat16 are added and divided in float32 and rounded once, at the end. Small pieces
// and the baseline travel as float32, in one collective. Large pieces travel as they are, half the
// bytes: each rank gets its share of every rank's piece, adds the shares up in the order of the
// ranks, and hands the rounded sum to all.
class FusedAllReduce {
 public:
  // `communicator` must outlive this object.
  explicit FusedAllReduce(Communicator* communicator) : communicator_(communicator) {}

  // Fills every `out`. Internal if the request asks for a check and the result deviates.
  Status Run(const Request& request);

 private:
  Status RunFused(const Request& request);
  Status RunUnfused(const Request& request);
  Status RunChecked(const Request& request);
  Status ReducePiece(const Request& request, const void* in, void* out, int64_t count);
  Status ReduceWidened(const Request& request, const void* in, void* out, int64_t count);
  Status ReduceFusedPiece(const Request& request, const void* in, void* out, int64_t count);
  Status ReduceInShares(const Request& request, const void* in, void* out, int64_t count);
  Status Flush(const Request& request);

  Communicator* communicator_;
  std::vector<char> buffer_;
  std::vector<const TensorBuffer*> packed_;  // what lies in buffer_, in order
  int64_t packed_nbytes_ = 0;
  // Of a piece of float16 or bfloat16 on its way: it as float32; or this rank's share of every
  // rank's, and their sum.
  std::vector<float> wide_;
  std::vector<uint16_t> shares_, share_sum_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_FUSED_ALLREDUCE_H_
