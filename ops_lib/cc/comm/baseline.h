#ifndef DDL_COMM_BASELINE_H_
#define DDL_COMM_BASELINE_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"

namespace ddl {

// The collectives of MPI itself: what ours are compared with, and what ranks use before they have
// ours. It waits without a limit, and spins.
class Baseline {
 public:
  virtual ~Baseline() = default;

  // The sum over all ranks by one plain MPI_Allreduce: float32, float64, int32, int64. `in` may
  // equal `out`. Source: MPI-4.1 section 6.9.6, which demands identical results on all ranks.
  virtual Status AllReduce(const void* in, void* out, int64_t count, DType dtype) = 0;
};

}  // namespace ddl

#endif  // DDL_COMM_BASELINE_H_
