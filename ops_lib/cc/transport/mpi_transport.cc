#include "transport/mpi_transport.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/backoff.h"
#include "core/stall.h"

namespace ddl {
namespace {

constexpr int kTag = 0;
// All ranks are at it, so the next part is near; longer than messages take within a host.
constexpr double kYieldS = 200e-6;
constexpr int64_t kMaxCount = int64_t{1} << 30;  // MPI counts are int

std::atomic<bool> process_has_abandoned_messages{false};

}  // namespace

Status MpiStatus(int result, const char* call) {
  if (result == MPI_SUCCESS) return Status();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  return Status(Code::kInternal, std::string(call) + " failed: " + std::string(text, length) +
                                     ". See mpirun's output for the rank or host that was lost.");
}

MpiTransport::MpiTransport(MPI_Comm comm, std::vector<int> global_ranks, double timeout_s)
    : comm_(comm), global_ranks_(std::move(global_ranks)), timeout_s_(timeout_s) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
}

MpiTransport::~MpiTransport() {
  if (broken_.ok()) {
    MPI_Comm_free(&comm_);
  } else {
    // With messages under way, freeing it could wait for ranks that are gone; and MPI may write to
    // where they were expected until the process ends.
    static_cast<void>(scratch_.release());
  }
}

bool MpiTransport::ProcessHasAbandonedMessages() { return process_has_abandoned_messages.load(); }

Status MpiTransport::KeepError(Status status) {
  if (status.ok() || !broken_.ok()) return status;
  broken_ = std::move(status);
  if (!sends_.empty() || !receives_.empty()) {
    abandoned_.store(true);
    process_has_abandoned_messages.store(true);
  }
  for (Part& part : receives_) {
    if (part.request == MPI_REQUEST_NULL) continue;
    // What has begun to arrive is not stopped by this; but it arrives only while MPI is called.
    int done = 0;
    MPI_Cancel(&part.request);
    MPI_Test(&part.request, &done, MPI_STATUS_IGNORE);
  }
  return broken_;
}

template <typename Begin>
Status MpiTransport::Post(std::deque<Part>* queue, int peer, int64_t nbytes, Begin begin) {
  DDL_RETURN_IF_ERROR(broken_);
  int64_t first = 0;
  do {
    Part part;
    part.peer = peer;
    part.nbytes = static_cast<int>(std::min(kMaxCount, nbytes - first));
    part.last = first + part.nbytes == nbytes;
    if (part.nbytes > 0) DDL_RETURN_IF_ERROR(KeepError(begin(first, &part)));
    queue->push_back(part);
    first += part.nbytes;
  } while (first < nbytes);
  return Status();
}

Status MpiTransport::Send(int peer, const void* bytes, int64_t nbytes) {
  ++pending_sends_;
  return Post(&sends_, peer, nbytes, [&](int64_t first, Part* part) {
    return MpiStatus(MPI_Isend(static_cast<const char*>(bytes) + first, part->nbytes, MPI_BYTE,
                               peer, kTag, comm_, &part->request),
                     "MPI_Isend");
  });
}

Status MpiTransport::Receive(int peer, void* bytes, int64_t nbytes) {
  return Post(&receives_, peer, nbytes, [&](int64_t first, Part* part) {
    return MpiStatus(MPI_Irecv(static_cast<char*>(bytes) + first, part->nbytes, MPI_BYTE, peer,
                               kTag, comm_, &part->request),
                     "MPI_Irecv");
  });
}

Status MpiTransport::AwaitReceive() { return Await("MPI_Irecv", &receives_); }

Status MpiTransport::AwaitSends(int64_t pending) {
  for (; pending_sends_ > pending; --pending_sends_) {
    DDL_RETURN_IF_ERROR(Await("MPI_Isend", &sends_));
  }
  return Status();
}

// The oldest message of `queue`.
Status MpiTransport::Await(const char* what, std::deque<Part>* queue) {
  DDL_RETURN_IF_ERROR(broken_);
  for (bool last = false; !last; queue->pop_front()) {
    Part& part = queue->front();
    last = part.last;
    if (part.nbytes == 0) continue;
    const Backoff backoff(kYieldS);
    StallClock clock;
    int grace_polls = 0;
    MPI_Status status;
    while (true) {
      int done = 0;
      DDL_RETURN_IF_ERROR(KeepError(MpiStatus(MPI_Test(&part.request, &done, &status), what)));
      if (done) break;
      if (interrupted_.load()) return KeepError(Interrupted());
      if (clock.Poll() > timeout_s_ && ++grace_polls > kGracePolls) {
        return KeepError(Status(Code::kDeadlineExceeded,
                                "rank " + std::to_string(global_ranks_[part.peer]) +
                                    " stopped in the middle of a collective and did not go on "
                                    "within " +
                                    Seconds(timeout_s_) + ". Look for what blocks it."));
      }
      backoff.Pause();
    }
    if (queue != &receives_) continue;
    int got = 0;
    MPI_Get_count(&status, MPI_BYTE, &got);
    if (got != part.nbytes) {
      return KeepError(Status(
          Code::kInternal,
          "rank " + std::to_string(global_ranks_[part.peer]) + " sent " + std::to_string(got) +
              " bytes where rank " + std::to_string(global_ranks_[rank_]) + " expected " +
              std::to_string(part.nbytes) + ". Do all ranks run the same build of ddl?"));
    }
  }
  return Status();
}

}  // namespace ddl
