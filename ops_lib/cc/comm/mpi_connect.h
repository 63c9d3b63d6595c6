#ifndef DDL_COMM_MPI_CONNECT_H_
#define DDL_COMM_MPI_CONNECT_H_

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "core/config.h"

namespace ddl {

// Joins `ranks` of MPI_COMM_WORLD, or all if there are none, in the way that suits where they are:
// through shared memory on one host, by messages where each has a host of its own, else both.
// Collective over them. `id`: of that process set, 0 of all ranks. On every rank,
// FailedPrecondition if DDL_TRANSPORT demands shared memory that is not to be had, or differs.
Status Connect(const Config& config, int id, const std::vector<int>& ranks,
               std::unique_ptr<Communicator>* communicator);

}  // namespace ddl

#endif  // DDL_COMM_MPI_CONNECT_H_
