#ifndef DDL_RUNTIME_INLINE_REQUEST_H_
#define DDL_RUNTIME_INLINE_REQUEST_H_

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "runtime/agreement.h"
#include "runtime/request.h"

namespace ddl {

// What goes with the agreement on a request, where the ranks share memory: all of a small allreduce,
// reducescatter or broadcast; of an allgather or alltoall the numbers by which the ranks tell each
// other how many rows they bring. So the first are done in one round, the others save one.
//
// All of them travel as a sum. To numbers, and to the bytes of a broadcast taken as integers, all
// ranks but one add zeros, which leaves the bits of that one.
class InlineRequest {
 public:
  // `communicator` must outlive this object.
  explicit InlineRequest(Communicator* communicator) : communicator_(communicator) {}

  // Whether something of the request goes with the agreement: then `tensor` holds it, the same size
  // on all ranks.
  bool Pack(const Request& request, InlineTensor* tensor);

  // When that is reduced. True: every `out` is filled, and nothing is left to do. Else `numbers` are
  // those of all ranks.
  bool Unpack(const Request& request);
  const std::vector<int64_t>& numbers() const { return numbers_; }

 private:
  Communicator* const communicator_;
  std::vector<char> buffer_;  // tensors, side by side
  std::vector<int64_t> numbers_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_INLINE_REQUEST_H_
