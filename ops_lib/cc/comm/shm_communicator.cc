#include "comm/shm_communicator.h"

#include "algorithms/pieces.h"

namespace ddl {

Status ShmCommunicator::Send(int peer, std::string message, MessageTag tag) {
  return base_->Send(peer, std::move(message), tag);
}

Status ShmCommunicator::TryReceive(int peer, std::string* message, bool* received, MessageTag tag) {
  return base_->TryReceive(peer, message, received, tag);
}

Status ShmCommunicator::TryReceiveAny(int* peer, std::string* message, MessageTag tag) {
  return base_->TryReceiveAny(peer, message, tag);
}

Status ShmCommunicator::Barrier(const Arrival& arrival, BarrierResult* result) {
  return ddl::HostBarrier(memory_->group.get(), arrival, result);
}

Status ShmCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                  int divisor) {
  return AllReduceN({{in, out, count}}, dtype, divisor);
}

void ShmCommunicator::Break(const Status& reason) { (void)memory_->channels->Break(reason); }

Status ShmCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                   int divisor) {
  const TensorList list(tensors, static_cast<int64_t>(DTypeSize(dtype)));
  const Range all{0, list.nbytes()};
  return memory_->channels->Run(list.nbytes(), [&](HostGroup* group, int channel, int channels) {
    return AllReduceInPieces(group, list, SplitAtCacheLines(all, channels)[channel], dtype,
                             divisor);
  });
}

Status ShmCommunicator::Broadcast(void* buffer, int64_t nbytes, int root) {
  return memory_->channels->Run(nbytes, [&](HostGroup* group, int channel, int channels) {
    return BroadcastInPieces(group, buffer, nbytes,
                             SplitAtCacheLines({0, nbytes}, channels)[channel], root);
  });
}

Status ShmCommunicator::AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) {
  const std::vector<Range> shares = ConsecutiveRanges(nbytes);
  const TensorList whole({{nullptr, out, shares.back().end}}, 1);
  return memory_->channels->Run(whole.nbytes(), [&](HostGroup* group, int channel, int channels) {
    const std::vector<Range> parts = SplitEachAtCacheLines(shares, channels, channel);
    const int rank = group->rank();
    return AllGatherInPieces(group, whole, parts,
                             static_cast<const char*>(in) + parts[rank].begin - shares[rank].begin);
  });
}

}  // namespace ddl
