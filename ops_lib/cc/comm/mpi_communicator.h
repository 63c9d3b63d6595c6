#ifndef DDL_COMM_MPI_COMMUNICATOR_H_
#define DDL_COMM_MPI_COMMUNICATOR_H_

#include <mpi.h>

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace ddl {

// A group of ranks over an MPI communicator of its own, so that our messages never meet those of
// the user's script.
class MpiCommunicator : public Communicator {
 public:
  // All ranks of MPI_COMM_WORLD; collective.
  static Status OverWorld(std::unique_ptr<Communicator>* communicator);
  ~MpiCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }

  Status Send(int peer, std::string message) override;
  Status TryReceive(int peer, std::string* message, bool* received) override;
  Status Meet(const Offer& offer, bool* alike) override;
  Status AllReduce(const void* in, void* out, int64_t count, DType dtype, int divisor) override;
  Status AllReduceBaseline(const void* in, void* out, int64_t count, DType dtype) override;
  Status Broadcast(void* buffer, int64_t nbytes) override;
  Status ExchangeShares(const void* in, void* out, const std::vector<int64_t>& nbytes) override;
  Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override;

 private:
  struct PendingSend {
    std::string message;
    MPI_Request request;
  };

  MpiCommunicator() = default;
  Status DropFinishedSends();
  Status BroadcastFrom(int root, void* buffer, int64_t nbytes);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::list<PendingSend> sends_;  // a list: MPI holds pointers into the messages
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_COMMUNICATOR_H_
