#ifndef DDL_COMM_SHM_COMMUNICATOR_H_
#define DDL_COMM_SHM_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "core/config.h"
#include "transport/host_group.h"
#include "transport/shared_segment.h"

namespace ddl {

// Replaces `communicator` by one whose ranks reduce through shared memory, where all of them are on
// one host and can; else leaves it. Collective. FailedPrecondition on every rank if `transport`
// demands shared memory that is not to be had, or differs among ranks.
Status ShareMemory(Transport transport, double timeout_s,
                   std::unique_ptr<Communicator>* communicator);

// A group whose ranks are all on one host. Messages and the baseline go over `base`.
class ShmCommunicator : public Communicator {
 public:
  // `group` lives in `segment`.
  ShmCommunicator(std::unique_ptr<Communicator> base, std::unique_ptr<SharedSegment> segment,
                  std::unique_ptr<HostGroup> group)
      : base_(std::move(base)), segment_(std::move(segment)), group_(std::move(group)) {}

  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  int local_rank() const override { return base_->local_rank(); }
  int local_size() const override { return base_->local_size(); }

  Status Send(int peer, std::string message) override;
  Status TryReceive(int peer, std::string* message, bool* received) override;
  bool CanMeet() const override { return true; }
  bool SumsHalves() const override { return true; }
  Status Meet(const Offer& offer, bool* alike) override;
  Status AllReduce(const void* in, void* out, int64_t count, DType dtype, int divisor) override;
  Status AllReduceBaseline(const void* in, void* out, int64_t count, DType dtype) override;
  Status Broadcast(void* buffer, int64_t nbytes) override;
  Status ExchangeShares(const void* in, void* out, const std::vector<int64_t>& nbytes) override;
  Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override;

 private:
  // In this order: the group's last act is in the segment.
  std::unique_ptr<Communicator> base_;
  std::unique_ptr<SharedSegment> segment_;
  std::unique_ptr<HostGroup> group_;
};

}  // namespace ddl

#endif  // DDL_COMM_SHM_COMMUNICATOR_H_
