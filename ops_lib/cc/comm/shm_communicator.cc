#include "comm/shm_communicator.h"

#include <numeric>

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
                                  Reduction reduction) {
  return AllReduceN({{in, out, count}}, dtype, reduction);
}

void ShmCommunicator::Break(const Status& reason) { (void)memory_->channels->Break(reason); }

Status ShmCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                   Reduction reduction) {
  const TensorList list(tensors, static_cast<int64_t>(DTypeSize(dtype)));
  const Range all{0, list.nbytes()};
  return memory_->channels->Run(list.nbytes(), [&](HostGroup* group, int channel, int channels) {
    return AllReduceInPieces(group, list, SplitAtCacheLines(all, channels)[channel], dtype,
                             reduction);
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

Status ShmCommunicator::AllGatherN(const std::vector<SharedTensor>& tensors) {
  if (tensors.size() == 1) return Communicator::AllGatherN(tensors);
  const ShareList list = ShareList::Gathered(tensors, rank());
  return memory_->channels->Run(
      TotalSize(list.ranges()), [&](HostGroup* group, int channel, int channels) {
        return AllGatherInPieces(group, list.tensors(),
                                 SplitEachAtCacheLines(list.ranges(), channels, channel), nullptr);
      });
}

Status ShmCommunicator::ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                                       Reduction reduction) {
  const ShareList list = ShareList::Scattered(tensors, rank());
  return memory_->channels->Run(
      TotalSize(list.ranges()), [&](HostGroup* group, int channel, int channels) {
        return ReduceScatterInPieces(group, list.tensors(),
                                     SplitEachAtCacheLines(list.ranges(), channels, channel), dtype,
                                     reduction);
      });
}

Status ShmCommunicator::AllToAll(const void* in, void* out, const Exchange& exchange) {
  std::vector<int> all(size());
  std::iota(all.begin(), all.end(), 0);
  return AllToAllThrough(memory_->channels.get(), in, out, exchange, all);
}

}  // namespace ddl
