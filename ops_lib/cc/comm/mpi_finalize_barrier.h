#ifndef DDL_COMM_MPI_FINALIZE_BARRIER_H_
#define DDL_COMM_MPI_FINALIZE_BARRIER_H_

#include "transport/shared_segment.h"

namespace ddl {

// A barrier of the ranks of a host after MPI_Finalize, where MPI has none.
//
// A command may run one MPI program after another. When the second one of a rank is in MPI_Init
// before the first one of another rank has left MPI_Finalize, Open MPI 5 gives it the addresses of
// that first program, and the job hangs (seen in 5.0.11: the PMIx server of the host is told of
// both by one connection after the other, and takes them for one process).
class MpiFinalizeBarrier {
 public:
  // Once MPI is there. Collective over all ranks. Those of a host that cannot share memory, as in
  // several containers, and those of which one does not call Wait, will not wait.
  void Prepare(bool waits);

  // After MPI_Finalize. Returns when all ranks of the host have come, and in any case after kMostS: one that
  // was killed meanwhile does not come.
  void Wait();

  static constexpr double kMostS = 30;

 private:
  SharedSegment memory_;
  int size_ = 1;  // of those who wait for each other
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_FINALIZE_BARRIER_H_
