#ifndef DDL_BENCHMARKS_COLLECTIVES_REQUIRE_H_
#define DDL_BENCHMARKS_COLLECTIVES_REQUIRE_H_

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/status.h"

// Ends all ranks, and says why.
[[noreturn]] inline void Die(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

inline void Require(const ddl::Status& status) {
  if (!status.ok()) Die(status.message());
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_REQUIRE_H_
