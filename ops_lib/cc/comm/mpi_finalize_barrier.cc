#include "comm/mpi_finalize_barrier.h"

#include <mpi.h>

#include <atomic>
#include <cstdint>

#include "core/backoff.h"

namespace ddl {

void MpiFinalizeBarrier::Prepare(bool waits) {
  MPI_Comm host = MPI_COMM_NULL;
  if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host) !=
      MPI_SUCCESS) {
    return;
  }
  int rank = 0, size = 1;
  MPI_Comm_rank(host, &rank);
  MPI_Comm_size(host, &size);
  if (size > 1) {
    SharedSegment::Address address;
    bool shared = rank == 0 && memory_.Create(sizeof(std::atomic<int32_t>), &address).ok();
    MPI_Bcast(&address, sizeof(address), MPI_BYTE, 0, host);
    if (rank != 0) shared = memory_.Attach(address).ok();
    int ready = shared && waits;
    MPI_Allreduce(MPI_IN_PLACE, &ready, 1, MPI_INT, MPI_MIN, host);
    if (ready) size_ = size;
    memory_.Seal();
  }
  MPI_Comm_free(&host);
}

void MpiFinalizeBarrier::Wait() {
  if (size_ == 1) return;
  auto* arrived = static_cast<std::atomic<int32_t>*>(memory_.base());
  arrived->fetch_add(1);
  for (Backoff backoff; arrived->load() < size_ && backoff.elapsed_s() < kMostS;) backoff.Pause();
}

}  // namespace ddl
