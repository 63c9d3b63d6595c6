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
  return AllReduceInPieces(memory_->group.get(), in, out, count, dtype, divisor);
}

void ShmCommunicator::Break(const Status& reason) {
  (void)memory_->group->Break(reason, 0);
}

Status ShmCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                   int divisor) {
  return AllReduceInPieces(memory_->group.get(), tensors, dtype, divisor);
}

Status ShmCommunicator::Broadcast(void* buffer, int64_t nbytes, int root) {
  return BroadcastInPieces(memory_->group.get(), buffer, nbytes, root);
}

Status ShmCommunicator::AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) {
  return AllGatherInPieces(memory_->group.get(), in, out, nbytes);
}

}  // namespace ddl
