#include "comm/shm_communicator.h"

#include "algorithms/pieces.h"

namespace ddl {

Status ShmCommunicator::Send(int peer, std::string message, Channel channel) {
  return base_->Send(peer, std::move(message), channel);
}

Status ShmCommunicator::TryReceive(int peer, std::string* message, bool* received,
                                   Channel channel) {
  return base_->TryReceive(peer, message, received, channel);
}

Status ShmCommunicator::TryReceiveAny(int* peer, std::string* message, Channel channel) {
  return base_->TryReceiveAny(peer, message, channel);
}

Status ShmCommunicator::Meet(const Offer& offer, Met* met) {
  return ddl::Meet(memory_->group.get(), offer, met);
}

Status ShmCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                  int divisor) {
  return AllReduceN({{in, out, count}}, dtype, divisor);
}

void ShmCommunicator::Break(const Status& reason) { (void)memory_->lanes->Break(reason); }

Status ShmCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                   int divisor) {
  const TensorList row(tensors, static_cast<int64_t>(DTypeSize(dtype)));
  const Share all{0, row.nbytes()};
  return memory_->lanes->Run(row.nbytes(), [&](HostGroup* group, int lane, int lanes) {
    return AllReduceInPieces(group, row, CutAtLines(all, lanes)[lane], dtype, divisor);
  });
}

Status ShmCommunicator::Broadcast(void* buffer, int64_t nbytes, int root) {
  return memory_->lanes->Run(nbytes, [&](HostGroup* group, int lane, int lanes) {
    return BroadcastInPieces(group, buffer, nbytes, CutAtLines({0, nbytes}, lanes)[lane], root);
  });
}

Status ShmCommunicator::AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) {
  const std::vector<Share> shares = OneAfterTheOther(nbytes);
  const TensorList whole({{nullptr, out, shares.back().end}}, 1);
  return memory_->lanes->Run(whole.nbytes(), [&](HostGroup* group, int lane, int lanes) {
    const std::vector<Share> parts = CutEachAtLines(shares, lanes, lane);
    const int rank = group->rank();
    return AllGatherInPieces(group, whole, parts,
                             static_cast<const char*>(in) + parts[rank].begin - shares[rank].begin);
  });
}

}  // namespace ddl
