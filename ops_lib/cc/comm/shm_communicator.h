#ifndef DDL_COMM_SHM_COMMUNICATOR_H_
#define DDL_COMM_SHM_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "comm/host_memory.h"

namespace ddl {

// A group whose ranks are all on one host. Messages go over `base`.
class ShmCommunicator : public Communicator {
 public:
  ShmCommunicator(std::unique_ptr<Communicator> base, std::unique_ptr<HostMemory> memory)
      : base_(std::move(base)), memory_(std::move(memory)) {}

  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  int local_rank() const override { return base_->local_rank(); }
  int local_size() const override { return base_->local_size(); }

  Status Send(int peer, std::string message, MessageTag tag) override;
  Status TryReceive(int peer, std::string* message, bool* received, MessageTag tag) override;
  Status TryReceiveAny(int* peer, std::string* message, MessageTag tag) override;
  Status Flush() override { return base_->Flush(); }
  bool ReducesInline() const override { return true; }
  const char* TransportName() const override { return "shared memory"; }
  Status Barrier(const Arrival& arrival, BarrierResult* result) override;
  Status AllReduce(const void* in, void* out, int64_t count, DType dtype,
                   Reduction reduction) override;
  void Break(const Status& reason) override;
  bool HasAbandonedMessages() const override { return base_->HasAbandonedMessages(); }
  Status AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                    Reduction reduction) override;
  Status Broadcast(void* buffer, int64_t nbytes, int root) override;
  Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override;
  Status AllGatherN(const std::vector<SharedTensor>& tensors) override;
  Status ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                        Reduction reduction) override;
  Status AllToAll(const void* in, void* out, const Exchange& exchange) override;
  Baseline* baseline() override { return base_->baseline(); }

 private:
  std::unique_ptr<Communicator> base_;
  std::unique_ptr<HostMemory> memory_;
};

}  // namespace ddl

#endif  // DDL_COMM_SHM_COMMUNICATOR_H_
