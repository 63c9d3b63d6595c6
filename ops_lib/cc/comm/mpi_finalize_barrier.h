#ifndef DDL_COMM_MPI_FINALIZE_BARRIER_H_
#define DDL_COMM_MPI_FINALIZE_BARRIER_H_

#include "transport/shared_segment.h"

namespace ddl {

// A barrier of the ranks of a host after MPI_Finalize, where MPI has none.
//
// A command may run one MPI program after another. When the PMIx server of Open MPI 5 sees a rank's
// first program disconnect while the second one of any rank is in MPI_Init, it takes that rank for
// lost, and lets the fence of MPI_Init end without it: ranks connect to addresses of the first
// program, and hang. Source: openpmix, issue 4113; mended in its main branch in August 2026, seen
// in Open MPI 5.0.11.
class MpiFinalizeBarrier {
 public:
  // Once MPI is there. Collective over all ranks. Those of a host that cannot share memory, as in
  // several containers, and those of which one does not call Wait, will not wait for each other.
  void Prepare(bool waits);

  // After MPI_Finalize. Returns when the host's PMIx server has seen all ranks of the host
  // disconnect, and in any case after kMostS: a rank that was killed meanwhile does not come.
  void Wait();

  static constexpr double kMostS = 30;

 private:
  SharedSegment memory_;
  int size_ = 1;     // of those who wait for each other
  int server_ = -1;  // a copy of this rank's connection to the PMIx server, if it has one
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_FINALIZE_BARRIER_H_
