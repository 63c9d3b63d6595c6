#include "comm/shm_communicator.h"

#include "algorithms/pieces.h"

namespace ddl {

Status ShareMemory(Transport transport, double timeout_s,
                   std::unique_ptr<Communicator>* communicator) {
  Communicator& base = **communicator;
  const int size = base.size();
  if (size == 1) return Status();
  // Ranks of different hosts, or with different settings, must not wait for each other below.
  int32_t votes[] = {transport == Transport::kMpi, transport == Transport::kShm,
                     base.local_size() == size};
  DDL_RETURN_IF_ERROR(base.AllReduceBaseline(votes, votes, 3, DType::kInt32));
  if (votes[0] % size != 0 || votes[1] % size != 0) {
    return Status(Code::kFailedPrecondition,
                  "DDL_TRANSPORT differs among the ranks. Give all of them the same value.");
  }
  if (transport == Transport::kMpi) return Status();
  if (votes[2] != size) {
    if (transport == Transport::kAuto) return Status();
    return Status(Code::kFailedPrecondition,
                  "DDL_TRANSPORT is shm, but the ranks are on several hosts. Set it to auto.");
  }
  // In each step all ranks take part, whatever has failed before.
  auto segment = std::make_unique<SharedSegment>();
  SharedSegment::Address address;
  Status status;
  if (base.rank() == 0) {
    status = segment->Create(HostGroup::Nbytes(size), &address);
    if (status.ok()) HostGroup::Format(segment->base(), size);
  }
  DDL_RETURN_IF_ERROR(base.Broadcast(&address, sizeof(address)));
  if (base.rank() != 0) status = segment->Attach(address);
  std::unique_ptr<HostGroup> group;
  if (status.ok()) {
    group = std::make_unique<HostGroup>(segment->base(), base.rank(), size, timeout_s);
  }
  int32_t failures = status.ok() ? 0 : 1;
  DDL_RETURN_IF_ERROR(base.AllReduceBaseline(&failures, &failures, 1, DType::kInt32));
  if (failures > 0) {
    group.reset();
    if (transport == Transport::kAuto) return Status();
    return status.ok() ? Status(Code::kFailedPrecondition,
                                "DDL_TRANSPORT is shm, but " + std::to_string(failures) +
                                    " of the ranks cannot share memory; they say why.")
                       : status;
  }
  segment->Seal();
  *communicator = std::make_unique<ShmCommunicator>(std::move(*communicator), std::move(segment),
                                                    std::move(group));
  return Status();
}

Status ShmCommunicator::Send(int peer, std::string message) {
  return base_->Send(peer, std::move(message));
}

Status ShmCommunicator::TryReceive(int peer, std::string* message, bool* received) {
  return base_->TryReceive(peer, message, received);
}

Status ShmCommunicator::Meet(const Offer& offer, bool* alike) {
  return ddl::Meet(group_.get(), offer, alike);
}

Status ShmCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                  int divisor) {
  return AllReduceInPieces(group_.get(), in, out, count, dtype, divisor);
}

Status ShmCommunicator::AllReduceBaseline(const void* in, void* out, int64_t count, DType dtype) {
  return base_->AllReduceBaseline(in, out, count, dtype);
}

Status ShmCommunicator::Broadcast(void* buffer, int64_t nbytes) {
  return BroadcastInPieces(group_.get(), buffer, nbytes);
}

Status ShmCommunicator::ExchangeShares(const void* in, void* out,
                                       const std::vector<int64_t>& nbytes) {
  return base_->ExchangeShares(in, out, nbytes);
}

Status ShmCommunicator::AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) {
  return AllGatherInPieces(group_.get(), in, out, nbytes);
}

}  // namespace ddl
