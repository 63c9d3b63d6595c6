#include "comm/mpi_communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "algorithms/direct_reduce_scatter.h"
#include "algorithms/network_allreduce.h"
#include "algorithms/ring.h"
#include "algorithms/tree_broadcast.h"
#include "core/backoff.h"
#include "core/stall.h"
#include "transport/mpi_transport.h"

namespace ddl {
namespace {

// FNV-1a, 64 bits.
uint64_t HashOf(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

// The other ranks do not take part: they may be in the middle of something else.
Status JoinSubset(const std::vector<int>& ranks, int id, MPI_Comm* comm) {
  MPI_Group all = MPI_GROUP_NULL, subset = MPI_GROUP_NULL;
  DDL_RETURN_IF_ERROR(MpiStatus(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group"));
  const int included =
      MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &subset);
  MPI_Group_free(&all);
  DDL_RETURN_IF_ERROR(MpiStatus(included, "MPI_Group_incl"));
  const int created = MPI_Comm_create_group(MPI_COMM_WORLD, subset, id, comm);
  MPI_Group_free(&subset);
  return MpiStatus(created, "MPI_Comm_create_group");
}

}  // namespace

Status MpiCommunicator::OverWorld(const std::string& host_id, double timeout_s, int id,
                                  const std::vector<int>& ranks,
                                  std::unique_ptr<MpiCommunicator>* communicator) {
  std::unique_ptr<MpiCommunicator> made(new MpiCommunicator(timeout_s));
  DDL_RETURN_IF_ERROR(ranks.empty() ? MpiStatus(MPI_Comm_dup(MPI_COMM_WORLD, &made->comm_),
                                                "MPI_Comm_dup")
                                    : JoinSubset(ranks, id, &made->comm_));
  MPI_Comm_set_errhandler(made->comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(made->comm_, &made->rank_);
  MPI_Comm_size(made->comm_, &made->size_);
  DDL_RETURN_IF_ERROR(made->FindHosts(host_id));
  made->order_.resize(made->size_);
  std::iota(made->order_.begin(), made->order_.end(), 0);
  std::stable_sort(made->order_.begin(), made->order_.end(),
                   [&](int a, int b) { return made->hosts_[a] < made->hosts_[b]; });
  const auto position = std::find(made->order_.begin(), made->order_.end(), made->rank_);
  DDL_RETURN_IF_ERROR(
      made->Join(0, static_cast<int>(position - made->order_.begin()), &made->all_));
  *communicator = std::move(made);
  return Status();
}

void MpiCommunicator::MakeBarrier() {
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < size_; ++rank) groups.push_back({rank});
  barrier_ = std::make_unique<DisseminationBarrier>(this, std::move(groups), timeout_s_);
}

Status MpiCommunicator::FindHosts(const std::string& host_id) {
  MPI_Comm host = MPI_COMM_NULL;
  DDL_RETURN_IF_ERROR(MpiStatus(
      MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host),
      "MPI_Comm_split_type"));
  MPI_Comm_rank(host, &local_rank_);
  MPI_Comm_size(host, &local_size_);
  int first = rank_;
  const int told = MPI_Bcast(&first, 1, MPI_INT, 0, host);
  MPI_Comm_free(&host);
  DDL_RETURN_IF_ERROR(MpiStatus(told, "MPI_Bcast"));

  const uint64_t key = host_id.empty() ? static_cast<uint64_t>(first) : HashOf(host_id);
  std::vector<uint64_t> keys(size_);
  DDL_RETURN_IF_ERROR(MpiStatus(
      MPI_Allgather(&key, 1, MPI_UINT64_T, keys.data(), 1, MPI_UINT64_T, comm_), "MPI_Allgather"));
  std::vector<uint64_t> seen;
  for (const uint64_t one : keys) {
    const auto found = std::find(seen.begin(), seen.end(), one);
    hosts_.push_back(static_cast<int>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(one);
  }
  return Status();
}

Status MpiCommunicator::Join(int group, int position, std::unique_ptr<Transport>* transport) {
  transport->reset();
  MPI_Comm comm = MPI_COMM_NULL;
  DDL_RETURN_IF_ERROR(MpiStatus(
      MPI_Comm_split(comm_, group < 0 ? MPI_UNDEFINED : group, position, &comm), "MPI_Comm_split"));
  if (comm == MPI_COMM_NULL) return Status();
  int size = 0;
  MPI_Comm_size(comm, &size);
  std::vector<int> global_ranks(size);
  DDL_RETURN_IF_ERROR(MpiStatus(
      MPI_Allgather(&rank_, 1, MPI_INT, global_ranks.data(), 1, MPI_INT, comm), "MPI_Allgather"));
  *transport = std::make_unique<MpiTransport>(comm, std::move(global_ranks), timeout_s_);
  return Status();
}

MpiCommunicator::~MpiCommunicator() {
  // A message still pending here was meant for a rank that had gone, or is one of such a rank.
  for (PendingSend& send : *sends_) {
    MPI_Cancel(&send.request);
    MPI_Request_free(&send.request);
  }
  if (sends_->empty() && receives_->empty()) {
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
    return;
  }
  // What has begun to move goes on while MPI_Finalize works, so its memory stays.
  static_cast<void>(sends_.release());
  static_cast<void>(receives_.release());
}

Status MpiCommunicator::DropFinishedSends() {
  for (auto send = sends_->begin(); send != sends_->end();) {
    int finished = 0;
    DDL_RETURN_IF_ERROR(MpiStatus(MPI_Test(&send->request, &finished, MPI_STATUS_IGNORE), "MPI_Test"));
    send = finished ? sends_->erase(send) : std::next(send);
  }
  return Status();
}

// A collective that failed has left messages under way, into and out of its tensors. MPI moves them
// whenever it is called, so it is not called again.
Status MpiCommunicator::KeepError(Status status) {
  if (broken_.ok()) broken_ = std::move(status);
  return broken_;
}

void MpiCommunicator::Break(const Status& reason) {
  if (broken_.ok() && barrier_) barrier_->Break(reason);  // as long as messages can be sent
  (void)KeepError(reason);
}

Status MpiCommunicator::Send(int peer, std::string message, MessageTag tag) {
  DDL_RETURN_IF_ERROR(broken_);
  sends_->push_back({peer, std::move(message), MPI_REQUEST_NULL});
  PendingSend& send = sends_->back();
  DDL_RETURN_IF_ERROR(
      MpiStatus(MPI_Isend(send.message.data(), static_cast<int>(send.message.size()), MPI_BYTE,
                          peer, static_cast<int>(tag), comm_, &send.request),
                "MPI_Isend"));
  return DropFinishedSends();
}

Status MpiCommunicator::TryReceive(int peer, std::string* message, bool* received, MessageTag tag) {
  DDL_RETURN_IF_ERROR(Probe(peer, &peer, message, tag));
  *received = peer >= 0;
  return Status();
}

Status MpiCommunicator::TryReceiveAny(int* peer, std::string* message, MessageTag tag) {
  return Probe(MPI_ANY_SOURCE, peer, message, tag);
}

Status MpiCommunicator::Probe(int source, int* peer, std::string* message, MessageTag tag) {
  *peer = -1;
  DDL_RETURN_IF_ERROR(broken_);
  if (!sends_->empty()) DDL_RETURN_IF_ERROR(DropFinishedSends());
  if (!receives_->empty()) {
    DDL_RETURN_IF_ERROR(TakeReceived(source, peer, message, tag));
    if (*peer >= 0) return Status();
  }
  int found = 0, nbytes = 0;
  MPI_Message handle;
  MPI_Status status;
  DDL_RETURN_IF_ERROR(MpiStatus(
      MPI_Improbe(source, static_cast<int>(tag), comm_, &found, &handle, &status), "MPI_Improbe"));
  if (!found) return Status();
  MPI_Get_count(&status, MPI_BYTE, &nbytes);
  receives_->push_back({status.MPI_SOURCE, tag, std::string(nbytes, '\0'), MPI_REQUEST_NULL});
  PendingReceive& receive = receives_->back();
  const int begun =
      MPI_Imrecv(receive.message.data(), nbytes, MPI_BYTE, &handle, &receive.request);
  if (begun != MPI_SUCCESS) receives_->pop_back();
  DDL_RETURN_IF_ERROR(MpiStatus(begun, "MPI_Imrecv"));
  // A short message is there as a whole. Of a long one the rest comes only while its sender looks
  // after it, so a wait for it could have no end.
  return TakeReceived(source, peer, message, tag);
}

// The first message that is there as a whole. None overtakes another one of its sender.
Status MpiCommunicator::TakeReceived(int source, int* peer, std::string* message, MessageTag tag) {
  std::vector<int> unfinished;  // those of whom a message is on its way
  for (auto receive = receives_->begin(); receive != receives_->end(); ++receive) {
    const int from = receive->peer;
    if (receive->tag != tag || (source != MPI_ANY_SOURCE && source != from)) continue;
    if (std::find(unfinished.begin(), unfinished.end(), from) != unfinished.end()) continue;
    int finished = 0;
    DDL_RETURN_IF_ERROR(
        MpiStatus(MPI_Test(&receive->request, &finished, MPI_STATUS_IGNORE), "MPI_Test"));
    if (finished) {
      *peer = from;
      *message = std::move(receive->message);
      receives_->erase(receive);
      break;
    }
    unfinished.push_back(from);
  }
  return Status();
}

Status MpiCommunicator::Flush() {
  DDL_RETURN_IF_ERROR(broken_);
  const Backoff backoff;
  StallClock clock;
  int grace_polls = 0;
  while (true) {
    DDL_RETURN_IF_ERROR(DropFinishedSends());
    if (sends_->empty()) return Status();
    if (clock.Poll() > timeout_s_ && ++grace_polls > kGracePolls) {
      return Status(Code::kDeadlineExceeded,
                    "rank " + std::to_string(sends_->front().peer) +
                        " did not take a message of rank " + std::to_string(rank_) + " within " +
                        Seconds(timeout_s_) + ". Look for what blocks it.");
    }
    backoff.Pause();
  }
}

Status MpiCommunicator::Barrier(const Arrival& arrival, BarrierResult* result) {
  DDL_RETURN_IF_ERROR(broken_);
  barrier_->Begin();
  return barrier_->ArriveAndWait(arrival, BarrierResult::kMatch, result);
}

Status MpiCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                  Reduction reduction) {
  DDL_RETURN_IF_ERROR(broken_);
  return KeepError(NetworkAllReduce(all_.get(), in, out, count, dtype, reduction));
}

Status MpiCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                   Reduction reduction) {
  return packed_.Run(tensors, dtype, [&](const void* in, void* out, int64_t count) {
    return AllReduce(in, out, count, dtype, reduction);
  });
}

Status MpiCommunicator::Broadcast(void* buffer, int64_t nbytes, int root) {
  DDL_RETURN_IF_ERROR(broken_);
  const auto position = std::find(order_.begin(), order_.end(), root) - order_.begin();
  return KeepError(TreeBroadcast(all_.get(), buffer, nbytes, static_cast<int>(position)));
}

Status MpiCommunicator::AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) {
  DDL_RETURN_IF_ERROR(broken_);
  std::vector<int64_t> begins(size_ + 1, 0);
  std::partial_sum(nbytes.begin(), nbytes.end(), begins.begin() + 1);
  std::vector<Range> ranges;
  for (const int rank : order_) ranges.push_back({begins[rank], begins[rank + 1]});
  return KeepError(RingAllGather(all_.get(), in, out, std::move(ranges)));
}

Status MpiCommunicator::ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                                       Reduction reduction) {
  DDL_RETURN_IF_ERROR(broken_);
  for (const SharedTensor& tensor : tensors) {
    std::vector<Range> shares;
    for (const int rank : order_) shares.push_back(tensor.shares[rank]);
    DDL_RETURN_IF_ERROR(KeepError(
        DirectReduceScatter(all_.get(), tensor.in, tensor.out, shares, dtype, reduction)));
  }
  return Status();
}

Status MpiCommunicator::AllToAll(const void* in, void* out, const Exchange& exchange) {
  DDL_RETURN_IF_ERROR(broken_);
  KeepOwnBlock(in, out, exchange.sent(rank_), exchange.received(rank_));
  return KeepError(AllToAllByMessages(all_.get(), in, out, exchange.SentTo(order_),
                                      exchange.ReceivedFrom(order_), exchange.Largest(order_)));
}

}  // namespace ddl
