#include "comm/mpi_session.h"

#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "transport/mpi_transport.h"

namespace ddl {
namespace {

// MPI_Finalize first deletes the attributes of MPI_COMM_SELF, while MPI still works: the one
// moment at which we can stop before somebody else's finalize. Source: MPI-4.1 section 11.2.4.
int OnSelfDeleted(MPI_Comm, int, void* session, void*) {
  static_cast<MpiSession*>(session)->OnFinalize();
  return MPI_SUCCESS;
}

// The process that MPI knows.
std::atomic<pid_t> opened_by{0};

}  // namespace

MpiSession::MpiSession(std::function<void()> on_finalize)
    : on_finalize_(std::move(on_finalize)), keyval_(MPI_KEYVAL_INVALID) {}

void MpiSession::OnFinalize() {
  owner_ = false;  // whoever called MPI_Finalize ends MPI; a second call would be an error
  on_finalize_();
}

Status MpiSession::Open() {
  opened_by.store(getpid());
  int initialized = 0, finalized = 0, provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized) {
    return Status(Code::kFailedPrecondition,
                  "MPI was already finalized in this process. Initialise ddl before that.");
  }
  if (initialized) {
    MPI_Query_thread(&provided);
  } else if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS) {
    return Status(Code::kInternal, "MPI_Init_thread failed. Start the script with mpirun.");
  }
  owner_ = !initialized;
  if (provided != MPI_THREAD_MULTIPLE) {
    if (!initialized) MPI_Finalize();
    return Status(Code::kFailedPrecondition,
                  !initialized
                      ? "This MPI library offers no MPI_THREAD_MULTIPLE, which ddl needs. "
                        "Install an MPI built with thread support."
                      : "MPI was initialised before ddl without MPI_THREAD_MULTIPLE. Ask for it "
                        "(mpi4py: mpi4py.rc.thread_level = 'multiple') or initialise ddl first.");
  }
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, OnSelfDeleted, &keyval_, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, keyval_, this);
  barrier_.Prepare(owner_);
  open_ = true;
  return Status();
}

void MpiSession::Close() {
  if (!open_) return;
  open_ = false;
  if (!owner_ || HasAbandonedMessages()) return;
  MPI_Finalize();
  barrier_.Wait();
}

bool MpiSession::HasAbandonedMessages() { return MpiTransport::ProcessHasAbandonedMessages(); }

void MpiSession::Abort(int exit_code) {
  if (getpid() != opened_by.load() && opened_by.load() != 0) _exit(exit_code);  // a forked child
  std::fflush(nullptr);
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized && !finalized) MPI_Abort(MPI_COMM_WORLD, exit_code);
  _exit(exit_code);
}

}  // namespace ddl
