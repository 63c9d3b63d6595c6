#ifndef DDL_COMM_MPI_FINALIZE_BARRIER_H_
#define DDL_COMM_MPI_FINALIZE_BARRIER_H_

#include <chrono>

#include "transport/shared_segment.h"

namespace ddl {

// A barrier of the ranks of a host after MPI_Finalize, where MPI has none.
//
// A command may run one MPI program after another. The PMIx server of Open MPI 5 may take a rank
// whose first program has ended for lost, and let the fence of MPI_Init end without it: ranks
// connect to addresses of the first program, and hang, or end with code 14. It does so
//  - when it sees that program disconnect while the second one of any rank is in MPI_Init. Source:
//    openpmix, issue 4113; mended in its main branch in August 2026.
//  - when it sees it disconnect before its thread has come from answering PMIx_Finalize to marking
//    the rank as finalized: op_cbfunc2 in openpmix's src/server/pmix_server.c. On a busy host.
// Both were seen in Open MPI 5.0.11.
class MpiFinalizeBarrier {
 public:
  // Once MPI is there. Collective over all ranks. Those of a host that cannot share memory, as in
  // several containers, and those of which one does not call Wait, will not wait for each other.
  // Each will disconnect from its host's PMIx server kDisconnectAfter later, whoever ends MPI.
  void Prepare(bool waits);

  // After MPI_Finalize. Returns when the host's PMIx server has seen all ranks of the host
  // disconnect, and in any case after kMostS: a rank that was killed meanwhile does not come.
  void Wait();

  static constexpr double kMostS = 30;
  static constexpr std::chrono::milliseconds kDisconnectAfter{100};

 private:
  SharedSegment memory_;
  int size_ = 1;     // of those who wait for each other
  int server_ = -1;  // a copy of this rank's connection to the PMIx server, if it has one
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_FINALIZE_BARRIER_H_
