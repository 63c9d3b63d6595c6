#ifndef DDL_COMM_MPI_COMMUNICATOR_H_
#define DDL_COMM_MPI_COMMUNICATOR_H_

#include <mpi.h>

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "algorithms/packed_allreduce.h"
#include "comm/communicator.h"
#include "comm/dissemination_barrier.h"
#include "comm/mpi_baseline.h"
#include "transport/transport.h"

namespace ddl {

// All ranks of the job over MPI communicators of its own, so that our messages never mix with those
// of the user's script. Tensors travel by our algorithms, in an order of the ranks in which those
// of one host are neighbours.
class MpiCommunicator : public Communicator {
 public:
  // These ranks of MPI_COMM_WORLD, or all if there are none; collective over them. `host_id` and
  // `timeout_s`: see Config; `id`: see Connect.
  static Status OverWorld(const std::string& host_id, double timeout_s, int id,
                          const std::vector<int>& ranks,
                          std::unique_ptr<MpiCommunicator>* communicator);
  ~MpiCommunicator() override;

  // The host of each rank, numbered from 0 in the order of their first ranks.
  const std::vector<int>& hosts() const { return hosts_; }

  // Before the first Barrier. Without one this is the base of another communicator, which has a
  // barrier of its own and tells the others itself why it is broken.
  void MakeBarrier();

  // Joins the ranks that give the same `group`, in the order of `position`; none if it is negative.
  // Collective over all ranks.
  Status Join(int group, int position, std::unique_ptr<Transport>* transport);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }

  const char* TransportName() const override { return "MPI"; }
  Status Send(int peer, std::string message, MessageTag tag) override;
  Status TryReceive(int peer, std::string* message, bool* received, MessageTag tag) override;
  Status TryReceiveAny(int* peer, std::string* message, MessageTag tag) override;
  Status Flush() override;
  Status Barrier(const Arrival& arrival, BarrierResult* result) override;
  Status AllReduce(const void* in, void* out, int64_t count, DType dtype,
                   Reduction reduction) override;
  void Break(const Status& reason) override;
  bool HasAbandonedMessages() const override { return all_->HasAbandonedMessages(); }
  Status AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                    Reduction reduction) override;
  Status Broadcast(void* buffer, int64_t nbytes, int root) override;
  Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override;
  Status ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                        Reduction reduction) override;
  Status AllToAll(const void* in, void* out, const Exchange& exchange) override;
  Baseline* baseline() override { return &baseline_; }

 private:
  struct PendingSend {
    int peer;
    std::string message;
    MPI_Request request;
  };
  // A message of which the beginning has come.
  struct PendingReceive {
    int peer;
    MessageTag tag;
    std::string message;
    MPI_Request request;
  };

  explicit MpiCommunicator(double timeout_s) : timeout_s_(timeout_s) {}
  Status KeepError(Status status);
  Status FindHosts(const std::string& host_id);
  Status DropFinishedSends();
  Status Probe(int source, int* peer, std::string* message, MessageTag tag);
  Status TakeReceived(int source, int* peer, std::string* message, MessageTag tag);

  const double timeout_s_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::vector<int> hosts_;
  std::vector<int> order_;  // ranks, host by host
  std::unique_ptr<Transport> all_;  // in that order
  // Lists: MPI holds pointers into the messages.
  std::unique_ptr<std::list<PendingSend>> sends_ = std::make_unique<std::list<PendingSend>>();
  std::unique_ptr<std::list<PendingReceive>> receives_ =
      std::make_unique<std::list<PendingReceive>>();
  std::unique_ptr<DisseminationBarrier> barrier_;  // of the ranks one by one, or null
  PackedAllReduce packed_;
  Status broken_;
  MpiBaseline baseline_{&comm_, &broken_};
};

}  // namespace ddl

#endif  // DDL_COMM_MPI_COMMUNICATOR_H_
