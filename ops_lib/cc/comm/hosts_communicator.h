#ifndef DDL_COMM_HOSTS_COMMUNICATOR_H_
#define DDL_COMM_HOSTS_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "algorithms/range.h"
#include "algorithms/tensor_list.h"
#include "comm/communicator.h"
#include "comm/dissemination_barrier.h"
#include "comm/host_memory.h"
#include "core/worker.h"
#include "transport/transport.h"

namespace ddl {

// Ranks on several hosts, several on some: shared memory within a host, messages between hosts.
//
// A sum takes three steps. The ranks of a host reduce-scatter through shared memory, so that each
// holds its share, 1/L of L ranks, summed over the host; the ranks with the same share on all hosts
// reduce it by messages (algorithms/network_allreduce.h); the ranks of a host gather the shares. Of
// S bytes each of H hosts sends 2 (H - 1) / H * S, whatever L, L ranks at once. Where hosts have
// different numbers of ranks, L is the smallest, and the other ranks have no share. Large shares go
// in fragments, so that the steps overlap: while one is on its way between the hosts, the next is
// scattered and the one before gathered. Halves travel as halves: added in float32 within a host
// and rounded, then so between hosts, and rounded again. Source: Cho et al., BlueConnect:
// Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy, 2019.
//
// A barrier is one of each host's ranks, then one of the first ranks of the hosts, which tell the
// other ranks of theirs the result, and until then that they are alive.
//
// A sum of which each rank gets its share takes the same way: the ranks of a host reduce-scatter, so
// that each holds its column, the shares of all ranks with its number on their host; the ranks of a
// column reduce-scatter by messages; and where a host has more ranks than another has, the others
// get their shares from those that have a column. Of S bytes each host sends (H - 1) / H * S.
//
// Averages of integers of up to 32 bits go over `base`, because a host's sum of them could wrap
// around: so each rank, and not each host, sends 2 (N - 1) / N * S bytes, of N ranks in all.
//
// What ranks send to each other goes through shared memory on a host, and by messages else.
//
// A broadcast goes from the root to the first rank of its host, from there to the first ranks of
// the others, and on through shared memory.
class HostsCommunicator : public Communicator {
 public:
  // `cross_host` joins the ranks of all hosts that hold this rank's share, by host; null if it has
  // none. `hosts`: the host of each rank. What is neither summed nor broadcast goes over `base`.
  HostsCommunicator(std::unique_ptr<Communicator> base, std::unique_ptr<HostMemory> memory,
                    std::unique_ptr<Transport> cross_host, int shares, std::vector<int> hosts);

  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  int local_rank() const override { return base_->local_rank(); }
  int local_size() const override { return base_->local_size(); }

  const char* TransportName() const override { return "shared memory, and MPI between hosts"; }
  Status Send(int peer, std::string message, MessageTag tag) override;
  Status TryReceive(int peer, std::string* message, bool* received, MessageTag tag) override;
  Status TryReceiveAny(int* peer, std::string* message, MessageTag tag) override;
  Status Flush() override;
  Status Barrier(const Arrival& arrival, BarrierResult* result) override;
  Status AllReduce(const void* in, void* out, int64_t count, DType dtype,
                   Reduction reduction) override;
  void Break(const Status& reason) override { (void)KeepError(reason); }
  bool HasAbandonedMessages() const override {
    return base_->HasAbandonedMessages() || (cross_host_ && cross_host_->HasAbandonedMessages());
  }
  Status AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                    Reduction reduction) override;
  Status Broadcast(void* buffer, int64_t nbytes, int root) override;
  Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override;
  Status ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                        Reduction reduction) override;
  Status AllToAll(const void* in, void* out, const Exchange& exchange) override;
  Baseline* baseline() override { return base_->baseline(); }

 private:
  // A barrier on this host, one with the other hosts by its first rank, and one on this host again.
  Status HierarchicalBarrier(const Arrival& arrival, BarrierResult* result);
  Status AllReduceTensors(const TensorList& tensors, DType dtype, Reduction reduction);
  // The first and the last step of a fragment; `own` is this rank's part of it.
  Status Scatter(const TensorList& tensors, const std::vector<Range>& fragment, char* own,
                 DType dtype, Reduction reduction);
  Status Gather(const TensorList& tensors, const std::vector<Range>& fragment, const char* own);
  Status ScatterTensors(const std::vector<SharedTensor>& tensors, DType dtype, Reduction reduction);
  Status AwaitNetwork();
  Status BroadcastPiece(char* buffer, int64_t nbytes, int root);
  Status KeepError(Status status);

  std::unique_ptr<Communicator> base_;
  std::unique_ptr<HostMemory> memory_;
  // Fragments of this rank's share, between the steps. Messages point to them, as long as
  // `cross_host_` lives.
  std::vector<char> fragments_;
  std::vector<char> columns_, shares_of_host_, own_shares_;  // of a ReduceScatterN
  std::unique_ptr<Transport> cross_host_;
  // Uses `cross_host_` while there are several fragments. Made when first there are.
  std::unique_ptr<Worker> network_thread_;
  const int shares_;
  const std::vector<int> hosts_;
  std::vector<int> numbers_;  // of each rank: its number on its host
  std::vector<int> here_;     // the ranks of this host
  DisseminationBarrier barrier_;
  Status broken_;
};

}  // namespace ddl

#endif  // DDL_COMM_HOSTS_COMMUNICATOR_H_
