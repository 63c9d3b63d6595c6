#ifndef DDL_COMM_MPI_BASELINE_H_
#define DDL_COMM_MPI_BASELINE_H_

#include <mpi.h>

#include <cstdint>

#include "comm/baseline.h"

namespace ddl {

class MpiBaseline : public Baseline {
 public:
  // Both must outlive this object. Once `broken` is an error, it answers every call.
  MpiBaseline(const MPI_Comm* comm, const Status* broken) : comm_(*comm), broken_(*broken) {}

  Status AllReduce(const void* in, void* out, int64_t count, DType dtype) override;

 private:
  const MPI_Comm& comm_;
  const Status& broken_;
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_BASELINE_H_
