#ifndef DDL_COMM_MPI_SESSION_H_
#define DDL_COMM_MPI_SESSION_H_

#include <atomic>
#include <functional>

#include "comm/mpi_finalize_barrier.h"
#include "core/status.h"

namespace ddl {

// MPI's lifetime in this process. Open and Close are called by one thread, the engine's.
//
// MPI may already be initialised by someone else (mpi4py): then it stays theirs, and Close leaves
// it running. When they finalize while we are still open, `on_finalize` runs in their thread; it
// must return only after the engine's thread has made its last MPI call. MPI keeps a pointer to the
// session, so it lives as long as the process.
class MpiSession {
 public:
  explicit MpiSession(std::function<void()> on_finalize);
  MpiSession(const MpiSession&) = delete;

  // Initialises MPI if nobody has. FailedPrecondition if MPI does not offer MPI_THREAD_MULTIPLE or
  // is already finalized.
  Status Open();

  // Ends MPI if we started it, and waits until the other ranks of the host have. All communicators
  // must be gone.
  void Close();

  // Whether an error has left messages under way. They may still be written to what they point to,
  // as long as MPI is called; so that must never be freed, and Close does not end MPI.
  static bool HasAbandonedMessages();

  // MPI is being finalized. Called by MPI, in the thread that finalizes.
  void OnFinalize();

  // Ends every rank of the job with this exit code; ends this process if MPI is not running.
  // Any thread may call it.
  [[noreturn]] static void Abort(int exit_code);

 private:
  std::function<void()> on_finalize_;
  int keyval_;
  bool open_ = false;
  std::atomic<bool> owner_{false};
  MpiFinalizeBarrier barrier_;
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_SESSION_H_
