// What Python calls through ctypes, besides the ops.

#include <cstdio>
#include <string>

#include "comm/mpi_session.h"
#include "runtime/engine.h"

// The loader looks for this text in the file, before it loads it: a library that was built for
// another TensorFlow cannot be loaded to be asked.
extern "C" __attribute__((visibility("default"), used)) const char ddl_built_for[] =
    "DDL_BUILT_FOR_TENSORFLOW=" DDL_TF_VERSION ";";

extern "C" {

// Starts the engine. Fills topology with rank, size, local_rank, local_size. Returns 0, or 1 with
// a message of at most message_size bytes.
__attribute__((visibility("default"))) int ddl_init(int topology[4], char* message,
                                                    int message_size) {
  ddl::Topology found;
  const ddl::Status status = ddl::Engine::Get().Start(&found);
  topology[0] = found.rank;
  topology[1] = found.size;
  topology[2] = found.local_rank;
  topology[3] = found.local_size;
  std::snprintf(message, message_size, "%s", status.message().c_str());
  return status.ok() ? 0 : 1;
}

// Whether collectives may be put on GPUs: 1 or 0. Known after ddl_init.
__attribute__((visibility("default"))) int ddl_device_collectives() {
  return ddl::Engine::Get().ReachesGpus() ? 1 : 0;
}

// Leaves the group; see Engine::Leave.
__attribute__((visibility("default"))) void ddl_shutdown() { ddl::Engine::Get().Leave(); }

// Ends all ranks with this exit code. Does not return.
__attribute__((visibility("default"))) void ddl_abort(int exit_code) {
  ddl::MpiSession::Abort(exit_code);
}

}  // extern "C"
