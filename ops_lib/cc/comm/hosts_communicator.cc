#include "comm/hosts_communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "algorithms/direct_reduce_scatter.h"
#include "algorithms/network_allreduce.h"
#include "algorithms/pieces.h"
#include "algorithms/range.h"
#include "algorithms/tree_broadcast.h"
#include "core/half.h"
#include "core/backoff.h"
#include "core/stall.h"
#include "core/vector.h"

namespace ddl {
namespace {

// Of a rank's share: at least, and for each host, so that a ring's segments stay whole.
constexpr int64_t kFragmentBytes = int64_t{1} << 20;
constexpr int64_t kFragmentBytesOfHost = int64_t{256} << 10;
// One is on its way between hosts while another is scattered or gathered.
constexpr int64_t kFragments = 2;
// Within a host, ranks wait for those that talk to other hosts: no longer than a piece takes.
constexpr int64_t kPieceBytes = int64_t{32} << 20;

// The shares of a sequence of tensors, cut into fragments.
class Fragments {
 public:
  // `shares` of `ranks` have one. No fragment of a share is longer than `largest`.
  Fragments(int64_t nbytes, int shares, int ranks, int64_t largest)
      : shares_(SplitAtCacheLines({0, nbytes}, shares)),
        room_(std::min(shares_[0].count(), largest)),
        size_((shares_[0].count() + room_ - 1) / room_) {
    shares_.resize(ranks);
  }

  int64_t size() const { return size_; }
  // Bytes of the longest.
  int64_t room() const { return room_; }
  // The whole share of a rank.
  const Range& share(int rank) const { return shares_[rank]; }
  // The same fragment of all shares.
  std::vector<Range> operator[](int64_t fragment) const {
    std::vector<Range> all = shares_;
    for (Range& one : all) {
      one.begin = std::min(one.begin + fragment * room_, one.end);
      one.end = std::min(one.begin + room_, one.end);
    }
    return all;
  }

 private:
  std::vector<Range> shares_;
  const int64_t room_, size_;
};

// At its end, however that comes, nothing is under way between the hosts.
class NetworkGuard {
 public:
  NetworkGuard(Worker* worker, Transport* transport) : worker_(worker), transport_(transport) {}
  NetworkGuard(const NetworkGuard&) = delete;
  ~NetworkGuard() {
    if (worker_ == nullptr || worker_->pending() == 0) return;
    transport_->Interrupt();
    Status status;
    while (worker_->pending() > 0) (void)worker_->Await(kLivenessCheckS, &status);
  }

 private:
  Worker* const worker_;
  Transport* const transport_;
};

std::vector<std::vector<int>> RanksByHost(const std::vector<int>& hosts) {
  std::vector<std::vector<int>> ranks(*std::max_element(hosts.begin(), hosts.end()) + 1);
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    ranks[hosts[rank]].push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace

HostsCommunicator::HostsCommunicator(std::unique_ptr<Communicator> base,
                                     std::unique_ptr<HostMemory> memory,
                                     std::unique_ptr<Transport> cross_host, int shares,
                                     std::vector<int> hosts)
    : base_(std::move(base)),
      memory_(std::move(memory)),
      cross_host_(std::move(cross_host)),
      shares_(shares),
      hosts_(std::move(hosts)),
      here_(RanksByHost(hosts_)[hosts_[base_->rank()]]),
      barrier_(base_.get(), RanksByHost(hosts_), memory_->group->timeout_s()) {
  for (size_t rank = 0; rank < hosts_.size(); ++rank) {
    numbers_.push_back(static_cast<int>(
        std::count(hosts_.begin(), hosts_.begin() + static_cast<int64_t>(rank), hosts_[rank])));
  }
}

Status HostsCommunicator::Send(int peer, std::string message, MessageTag tag) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->Send(peer, std::move(message), tag);
}

Status HostsCommunicator::TryReceive(int peer, std::string* message, bool* received,
                                     MessageTag tag) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->TryReceive(peer, message, received, tag);
}

Status HostsCommunicator::TryReceiveAny(int* peer, std::string* message, MessageTag tag) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->TryReceiveAny(peer, message, tag);
}

Status HostsCommunicator::Flush() {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->Flush();
}

Status HostsCommunicator::Barrier(const Arrival& arrival, BarrierResult* result) {
  DDL_RETURN_IF_ERROR(broken_);
  const Status status = HierarchicalBarrier(arrival, result);
  if (!status.ok()) barrier_.Break(status);
  return status;
}

Status HostsCommunicator::HierarchicalBarrier(const Arrival& arrival, BarrierResult* result) {
  barrier_.Begin();
  HostGroup* group = memory_->group.get();
  const Backoff backoff(0);
  Arrival within = arrival;
  within.count = 0;
  within.while_waiting = [&](const std::vector<bool>& arrived) {
    const auto first = std::find(arrived.begin(), arrived.end(), true) - arrived.begin();
    if (first == group->rank()) {
      std::vector<int> missing;
      for (int rank = 0; rank < group->size(); ++rank) {
        if (!arrived[rank]) missing.push_back(group->global_rank(rank));
      }
      DDL_RETURN_IF_ERROR(barrier_.ReportMissing(missing, backoff.elapsed_s()));
    }
    return barrier_.is_leader() ? barrier_.Poll() : Status();
  };
  BarrierResult outcome = BarrierResult::kMatch;
  DDL_RETURN_IF_ERROR(ddl::HostBarrier(group, within, &outcome));
  if (barrier_.is_leader()) {
    within.while_waiting = [group](const std::vector<bool>&) {
      group->Beat();
      return group->status();  // another rank of this host may fail meanwhile
    };
    const Status between = barrier_.ArriveAndWait(within, outcome, &outcome);
    if (!between.ok()) return group->Break(between, 0);
  }
  // The result. The others wait for the leader, and tell it whether the timeout applies to them. It
  // may have to wait for one rank of another host after the other, each within the timeout. So
  // theirs begins anew at each sign of life of it: it is for a leader that stands still.
  Arrival last;
  last.leaving = arrival.leaving;
  last.without_request = true;
  last.limited = [&arrival, group, seen = group->beats(0)]() mutable {
    const uint32_t beats = group->beats(0);
    return std::exchange(seen, beats) == beats && arrival.IsLimited();
  };
  last.title = arrival.title;
  last.while_waiting = [&](const std::vector<bool>&) {
    if (arrival.IsCancelled()) DDL_RETURN_IF_ERROR(barrier_.Cancel());
    if (barrier_.is_leader()) return Status();
    return barrier_.ReportLimit(arrival.IsLimited(), backoff.elapsed_s());
  };
  last.cancels = barrier_.is_leader() && outcome == BarrierResult::kCancelled;
  last.digest[0] = barrier_.is_leader() && outcome == BarrierResult::kMismatch;
  DDL_RETURN_IF_ERROR(ddl::HostBarrier(group, last, result));
  if (barrier_.is_leader()) *result = outcome;
  return Status();
}

Status HostsCommunicator::KeepError(Status status) {
  // At once for the others on this host, and for hosts at a barrier; those that wait for tensors
  // find out by waiting.
  if (!status.ok()) {
    broken_ = memory_->channels->Break(status);
    barrier_.Break(broken_);
    base_->Break(broken_);
  }
  return broken_;
}

Status HostsCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                    Reduction reduction) {
  return AllReduceN({{in, out, count}}, dtype, reduction);
}

Status HostsCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                     Reduction reduction) {
  DDL_RETURN_IF_ERROR(broken_);
  if (SumsWide(dtype, reduction)) return KeepError(base_->AllReduceN(tensors, dtype, reduction));
  const TensorList list(tensors, static_cast<int64_t>(DTypeSize(dtype)));
  if (list.nbytes() == 0) return Status();
  return KeepError(AllReduceTensors(list, dtype, reduction));
}

Status HostsCommunicator::AllReduceTensors(const TensorList& tensors, DType dtype,
                                           Reduction reduction) {
  const int rank_on_host = memory_->group->rank();
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  const int64_t hosts = 1 + *std::max_element(hosts_.begin(), hosts_.end());
  const Fragments fragments(tensors.nbytes(), shares_, memory_->group->size(),
                            std::max(kFragmentBytes, kFragmentBytesOfHost * hosts));
  const int64_t nbytes = std::min(fragments.size(), kFragments) * fragments.room();
  if (cross_host_ && nbytes > static_cast<int64_t>(fragments_.size())) fragments_.resize(nbytes);
  const auto own = [&](int64_t fragment) {
    return fragments_.data() + fragment % kFragments * fragments.room();
  };
  // A host's sum of halves is rounded when it leaves the host, so it is divided before: else it
  // could be too large for a half where the average is not.
  const Reduction within = reduction.DividedBy(IsHalf(dtype) ? reduction.divisor : 1);
  const Reduction after = reduction.DividedBy(reduction.divisor / within.divisor);
  const auto between = [&](int64_t fragment) {
    return NetworkAllReduce(cross_host_.get(), own(fragment), own(fragment),
                            fragments[fragment][rank_on_host].count() / element, dtype,
                            after,
                            fragments.share(rank_on_host).count() / element);
  };
  const bool overlap = cross_host_ && fragments.size() > 1;
  if (overlap && !network_thread_) network_thread_ = std::make_unique<Worker>("ddl-network");
  const NetworkGuard use(network_thread_.get(), cross_host_.get());
  for (int64_t step = 0; step <= fragments.size(); ++step) {
    if (step < fragments.size()) {
      DDL_RETURN_IF_ERROR(Scatter(tensors, fragments[step], own(step), dtype, within));
      if (overlap) {
        network_thread_->Submit([&between, step] { return between(step); });
      } else if (cross_host_) {
        DDL_RETURN_IF_ERROR(between(step));
      }
    }
    if (step == 0) continue;
    if (overlap) DDL_RETURN_IF_ERROR(AwaitNetwork());
    DDL_RETURN_IF_ERROR(Gather(tensors, fragments[step - 1], own(step - 1)));
  }
  return Status();
}

Status HostsCommunicator::Scatter(const TensorList& tensors, const std::vector<Range>& fragment,
                                  char* own, DType dtype, Reduction reduction) {
  return memory_->channels->Run(
      TotalSize(fragment), [&](HostGroup* group, int channel, int channels) {
        const std::vector<Range> parts = SplitEachAtCacheLines(fragment, channels, channel);
        char* const out = own + parts[group->rank()].begin - fragment[group->rank()].begin;
        return ReduceScatterInPieces(group, tensors, parts, out, dtype, reduction);
      });
}

Status HostsCommunicator::Gather(const TensorList& tensors, const std::vector<Range>& fragment,
                                 const char* own) {
  return memory_->channels->Run(
      TotalSize(fragment), [&](HostGroup* group, int channel, int channels) {
        const std::vector<Range> parts = SplitEachAtCacheLines(fragment, channels, channel);
        const char* const in = own + parts[group->rank()].begin - fragment[group->rank()].begin;
        return AllGatherInPieces(group, tensors, parts, in);
      });
}

// For the oldest fragment.
Status HostsCommunicator::AwaitNetwork() {
  Status status;
  while (!network_thread_->Await(kLivenessCheckS, &status)) {
    DDL_RETURN_IF_ERROR(memory_->group->status());
  }
  return status;
}

Status HostsCommunicator::Broadcast(void* buffer, int64_t nbytes, int root) {
  DDL_RETURN_IF_ERROR(broken_);
  for (int64_t first = 0; first < nbytes; first += kPieceBytes) {
    DDL_RETURN_IF_ERROR(KeepError(BroadcastPiece(static_cast<char*>(buffer) + first,
                                                 std::min(kPieceBytes, nbytes - first), root)));
  }
  return Status();
}

Status HostsCommunicator::BroadcastPiece(char* buffer, int64_t nbytes, int root) {
  const int host = hosts_[root];
  const bool at_root = hosts_[rank()] == host;
  // The root's host has it first; its first rank passes it on.
  const auto rank_on_host = at_root ? std::count(hosts_.begin(), hosts_.begin() + root, host) : 0;
  const auto between = [&] {
    return memory_->group->rank() == 0 ? TreeBroadcast(cross_host_.get(), buffer, nbytes, host)
                                       : Status();
  };
  if (!at_root) DDL_RETURN_IF_ERROR(between());
  DDL_RETURN_IF_ERROR(
      memory_->channels->Run(nbytes, [&](HostGroup* group, int channel, int channels) {
        return BroadcastInPieces(group, buffer, nbytes,
                                 SplitAtCacheLines({0, nbytes}, channels)[channel],
                                 static_cast<int>(rank_on_host));
      }));
  return at_root ? between() : Status();
}

Status HostsCommunicator::AllGather(const void* in, void* out,
                                    const std::vector<int64_t>& nbytes) {
  DDL_RETURN_IF_ERROR(broken_);
  return KeepError(base_->AllGather(in, out, nbytes));
}

Status HostsCommunicator::ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                                         Reduction reduction) {
  DDL_RETURN_IF_ERROR(broken_);
  if (SumsWide(dtype, reduction)) {
    return KeepError(base_->ReduceScatterN(tensors, dtype, reduction));
  }
  return KeepError(ScatterTensors(tensors, dtype, reduction));
}

Status HostsCommunicator::ScatterTensors(const std::vector<SharedTensor>& tensors, DType dtype,
                                         Reduction reduction) {
  const int hosts = 1 + *std::max_element(hosts_.begin(), hosts_.end());
  const int host = hosts_[rank()], number = memory_->group->rank();
  // All shares one behind the other: column by column, in it host by host.
  std::vector<TensorSpan> spans;
  std::vector<Range> columns(memory_->group->size());
  std::vector<Range> of_hosts(hosts);              // in this rank's column
  std::vector<int64_t> of_ranks(hosts_.size());    // bytes of each rank's, with gaps
  int64_t end = 0;
  for (int column = 0; column < shares_; ++column) {
    columns[column].begin = end;
    for (int of = 0; of < hosts; ++of) {
      const int64_t begin = end;
      for (size_t one = 0; one < hosts_.size(); ++one) {
        if (hosts_[one] != of || numbers_[one] % shares_ != column) continue;
        const int64_t before = end;
        for (const SharedTensor& tensor : tensors) {
          const Range& share = tensor.shares[one];
          spans.push_back({static_cast<const char*>(tensor.in) + share.begin, nullptr,
                           share.count()});
          end += (share.count() + TensorList::kLine - 1) / TensorList::kLine * TensorList::kLine;
        }
        of_ranks[one] = end - before;
      }
      if (column == number) {
        of_hosts[of] = {begin - columns[column].begin, end - columns[column].begin};
      }
    }
    columns[column].end = end;
  }
  const TensorList list(spans, 1);
  const Reduction within = reduction.DividedBy(IsHalf(dtype) ? reduction.divisor : 1);
  const Reduction after = reduction.DividedBy(reduction.divisor / within.divisor);
  columns_.resize(std::max<size_t>(columns_.size(), columns[number].count()));
  DDL_RETURN_IF_ERROR(Scatter(list, columns, columns_.data(), dtype, within));
  if (cross_host_) {
    shares_of_host_.resize(std::max<size_t>(shares_of_host_.size(), of_hosts[host].count()));
    DDL_RETURN_IF_ERROR(DirectReduceScatter(cross_host_.get(), columns_.data(),
                                            shares_of_host_.data(), of_hosts, dtype, after));
  }
  const char* own = shares_of_host_.data();
  if (std::any_of(numbers_.begin(), numbers_.end(), [&](int one) { return one >= shares_; })) {
    const int size = memory_->group->size();
    std::vector<int64_t> nbytes(static_cast<size_t>(size) * size, 0);
    for (int to = 0; to < size; ++to) nbytes[to % shares_ * size + to] = of_ranks[here_[to]];
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    own_shares_.resize(std::max<size_t>(own_shares_.size(), of_ranks[rank()]));
    DDL_RETURN_IF_ERROR(AllToAllThrough(memory_->channels.get(), shares_of_host_.data(),
                                        own_shares_.data(), Exchange(number, size, nbytes), all));
    own = own_shares_.data();
  }
  for (const SharedTensor& tensor : tensors) {
    const int64_t count = tensor.shares[rank()].count();
    CopyBytes(tensor.out, own, count, false);
    own += (count + TensorList::kLine - 1) / TensorList::kLine * TensorList::kLine;
  }
  return Status();
}

Status HostsCommunicator::AllToAll(const void* in, void* out, const Exchange& exchange) {
  DDL_RETURN_IF_ERROR(broken_);
  DDL_RETURN_IF_ERROR(
      KeepError(AllToAllThrough(memory_->channels.get(), in, out, exchange, here_)));
  return KeepError(base_->AllToAll(in, out, exchange.BetweenHosts(hosts_)));
}

}  // namespace ddl
