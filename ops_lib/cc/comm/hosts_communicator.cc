#include "comm/hosts_communicator.h"

#include <algorithm>

#include "algorithms/network_allreduce.h"
#include "algorithms/pieces.h"
#include "algorithms/share.h"
#include "algorithms/tree_broadcast.h"
#include "core/half.h"

namespace ddl {
namespace {

// Within a host, ranks wait for those that talk to other hosts: no longer than a piece takes.
constexpr int64_t kPieceBytes = int64_t{32} << 20;

}  // namespace

Status HostsCommunicator::Send(int peer, std::string message) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->Send(peer, std::move(message));
}

Status HostsCommunicator::TryReceive(int peer, std::string* message, bool* received) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->TryReceive(peer, message, received);
}

Status HostsCommunicator::Meet(const Offer& offer, Met* met) {
  return base_->Meet(offer, met);
}

Status HostsCommunicator::Kept(Status status) {
  // At once for the others on this host; those elsewhere find out by waiting.
  if (!status.ok()) {
    broken_ = memory_->group->Break(status, 0);
    base_->Break(broken_);
  }
  return broken_;
}

Status HostsCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                    int divisor) {
  DDL_RETURN_IF_ERROR(broken_);
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  for (int64_t first = 0; first < count; first += kPieceBytes / element) {
    DDL_RETURN_IF_ERROR(Kept(AllReducePiece(static_cast<const char*>(in) + first * element,
                                            static_cast<char*>(out) + first * element,
                                            std::min(kPieceBytes / element, count - first), dtype,
                                            divisor)));
  }
  return Status();
}

Status HostsCommunicator::AllReducePiece(const char* in, char* out, int64_t count, DType dtype,
                                         int divisor) {
  HostGroup* group = memory_->group.get();
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  std::vector<int64_t> nbytes(group->size(), 0);
  for (int share = 0; share < shares_; ++share) {
    nbytes[share] = ShareOf(count, shares_, share).count() * element;
  }
  char* own = out;
  if (column_) own += ShareOf(count, shares_, group->rank()).begin * element;
  // A host's sum of halves is rounded when it leaves the host, so it is divided before: else it
  // could be too large for a half where the average is not.
  const int within = IsHalf(dtype) ? divisor : 1;
  DDL_RETURN_IF_ERROR(ReduceScatterInPieces(group, in, own, nbytes, dtype, within));
  if (column_) {
    DDL_RETURN_IF_ERROR(NetworkAllReduce(column_.get(), own, own, nbytes[group->rank()] / element,
                                         dtype, divisor / within));
  }
  return AllGatherInPieces(group, own, out, nbytes);
}

Status HostsCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                     int divisor) {
  return packed_.Run(tensors, dtype, [&](const void* in, void* out, int64_t count) {
    return AllReduce(in, out, count, dtype, divisor);
  });
}

Status HostsCommunicator::Broadcast(void* buffer, int64_t nbytes, int root) {
  DDL_RETURN_IF_ERROR(broken_);
  for (int64_t first = 0; first < nbytes; first += kPieceBytes) {
    DDL_RETURN_IF_ERROR(Kept(BroadcastPiece(static_cast<char*>(buffer) + first,
                                            std::min(kPieceBytes, nbytes - first), root)));
  }
  return Status();
}

Status HostsCommunicator::BroadcastPiece(char* buffer, int64_t nbytes, int root) {
  HostGroup* group = memory_->group.get();
  const int host = hosts_[root];
  if (hosts_[rank()] == host) {
    // The root's host has it first; its first rank passes it on.
    const auto place = std::count(hosts_.begin(), hosts_.begin() + root, host);
    DDL_RETURN_IF_ERROR(BroadcastInPieces(group, buffer, nbytes, static_cast<int>(place)));
    return group->rank() == 0 ? TreeBroadcast(column_.get(), buffer, nbytes, host) : Status();
  }
  if (group->rank() == 0) {
    DDL_RETURN_IF_ERROR(TreeBroadcast(column_.get(), buffer, nbytes, host));
  }
  return BroadcastInPieces(group, buffer, nbytes, 0);
}

Status HostsCommunicator::AllGather(const void* in, void* out,
                                    const std::vector<int64_t>& nbytes) {
  DDL_RETURN_IF_ERROR(broken_);
  return Kept(base_->AllGather(in, out, nbytes));
}

}  // namespace ddl
