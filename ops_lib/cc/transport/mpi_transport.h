#ifndef DDL_TRANSPORT_MPI_TRANSPORT_H_
#define DDL_TRANSPORT_MPI_TRANSPORT_H_

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "transport/transport.h"

namespace ddl {

// MPI's answer to `call` as a Status.
Status MpiStatus(int result, const char* call);

// Messages over MPI.
//
// Waiting polls with sleeps that grow, because the cores belong to the training: MPI's own waits
// spin. MPI does not tell that a peer has died, so that is a DeadlineExceeded, unless mpirun ends
// this rank first.
class MpiTransport : public Transport {
 public:
  // Takes `comm` over, which carries no other messages. `global_ranks` are the ranks of its members
  // as users know them.
  MpiTransport(MPI_Comm comm, std::vector<int> global_ranks, double timeout_s);
  MpiTransport(const MpiTransport&) = delete;
  ~MpiTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(global_ranks_.size()); }

  Status Send(int peer, const void* bytes, int64_t nbytes) override;
  Status Receive(int peer, void* bytes, int64_t nbytes) override;
  // Whether any of this process has abandoned messages, which MPI may still move: then it must not
  // be asked to end.
  static bool ProcessHasAbandonedMessages();

  Status AwaitReceive() override;
  Status AwaitSends(int64_t pending) override;
  void Interrupt() override { interrupted_.store(true); }
  // Then the memory they point to must stay.
  bool HasAbandonedMessages() const override { return abandoned_.load(); }

 private:
  // A message, or a part of one that is too long for MPI.
  struct Part {
    int peer = 0;
    int nbytes = 0;
    bool last = true;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  template <typename Begin>
  Status Post(std::deque<Part>* queue, int peer, int64_t nbytes, Begin begin);
  Status Await(const char* what, std::deque<Part>* queue);
  // Keeps the first error. From then on nothing is received into memory that callers may have
  // freed.
  Status KeepError(Status status);

  MPI_Comm comm_;
  int rank_ = 0;
  const std::vector<int> global_ranks_;
  const double timeout_s_;
  std::deque<Part> sends_, receives_;
  int64_t pending_sends_ = 0;
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> abandoned_{false};
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_MPI_TRANSPORT_H_
