#ifndef DDL_ALGORITHMS_PACKED_ALLREDUCE_H_
#define DDL_ALGORITHMS_PACKED_ALLREDUCE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "algorithms/tensor_list.h"
#include "core/dtype.h"
#include "core/status.h"

namespace ddl {

// Reduces many tensors with few messages: small ones are laid side by side in a buffer of a few MiB
// and share a reduction, large ones are reduced where they lie. What shares a buffer depends on the
// shapes alone, so every bit of the result is the same on all ranks and in every run.
class PackedAllReduce {
 public:
  using Reduce = std::function<Status(const void* in, void* out, int64_t count)>;

  // Calls `reduce` as often as needed, until it fails.
  Status Run(const std::vector<TensorSpan>& tensors, DType dtype, const Reduce& reduce);

 private:
  Status Flush(int64_t element, const Reduce& reduce);

  std::vector<char> buffer_;
  std::vector<const TensorSpan*> packed_;  // what lies in buffer_, in order
  int64_t packed_nbytes_ = 0;
};

}  // namespace ddl

#endif  // DDL_ALGORITHMS_PACKED_ALLREDUCE_H_
