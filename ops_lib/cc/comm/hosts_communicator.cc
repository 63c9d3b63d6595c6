#include "comm/hosts_communicator.h"

#include <algorithm>
#include <utility>

#include "algorithms/network_allreduce.h"
#include "algorithms/pieces.h"
#include "algorithms/share.h"
#include "algorithms/tree_broadcast.h"
#include "core/half.h"
#include "core/pause.h"
#include "core/stall.h"

namespace ddl {
namespace {

// Of a rank's share: at least, and for each host, so that a ring's segments stay whole.
constexpr int64_t kFragmentBytes = int64_t{1} << 20;
constexpr int64_t kFragmentBytesOfHost = int64_t{256} << 10;
// One is on its way between hosts while another is scattered or gathered.
constexpr int64_t kFragments = 2;
// Within a host, ranks wait for those that talk to other hosts: no longer than a piece takes.
constexpr int64_t kPieceBytes = int64_t{32} << 20;

// The shares of a row of tensors, cut into fragments.
class Fragments {
 public:
  // `shares` of `ranks` have one. No fragment of a share is longer than `largest`.
  Fragments(int64_t nbytes, int shares, int ranks, int64_t largest)
      : shares_(CutAtLines({0, nbytes}, shares)),
        room_(std::min(shares_[0].count(), largest)),
        size_((shares_[0].count() + room_ - 1) / room_) {
    shares_.resize(ranks);
  }

  int64_t size() const { return size_; }
  // Bytes of the longest.
  int64_t room() const { return room_; }
  // The whole share of a rank.
  const Share& share(int rank) const { return shares_[rank]; }
  // The same fragment of all shares.
  std::vector<Share> operator[](int64_t fragment) const {
    std::vector<Share> all = shares_;
    for (Share& one : all) {
      one.begin = std::min(one.begin + fragment * room_, one.end);
      one.end = std::min(one.begin + room_, one.end);
    }
    return all;
  }

 private:
  std::vector<Share> shares_;
  const int64_t room_, size_;
};

// At its end, however that comes, nothing is under way between the hosts.
class NetworkUse {
 public:
  NetworkUse(Worker* worker, Transport* transport) : worker_(worker), transport_(transport) {}
  NetworkUse(const NetworkUse&) = delete;
  ~NetworkUse() {
    if (worker_ == nullptr || worker_->pending() == 0) return;
    transport_->Interrupt();
    Status status;
    while (worker_->pending() > 0) (void)worker_->Await(kLookAroundS, &status);
  }

 private:
  Worker* const worker_;
  Transport* const transport_;
};

std::vector<std::vector<int>> RanksOf(const std::vector<int>& hosts) {
  std::vector<std::vector<int>> ranks(*std::max_element(hosts.begin(), hosts.end()) + 1);
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    ranks[hosts[rank]].push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace

HostsCommunicator::HostsCommunicator(std::unique_ptr<Communicator> base,
                                     std::unique_ptr<HostMemory> memory,
                                     std::unique_ptr<Transport> column, int shares,
                                     std::vector<int> hosts)
    : base_(std::move(base)),
      memory_(std::move(memory)),
      column_(std::move(column)),
      shares_(shares),
      hosts_(std::move(hosts)),
      barrier_(base_.get(), RanksOf(hosts_), memory_->group->timeout_s()) {}

Status HostsCommunicator::Send(int peer, std::string message, Channel channel) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->Send(peer, std::move(message), channel);
}

Status HostsCommunicator::TryReceive(int peer, std::string* message, bool* received,
                                     Channel channel) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->TryReceive(peer, message, received, channel);
}

Status HostsCommunicator::TryReceiveAny(int* peer, std::string* message, Channel channel) {
  DDL_RETURN_IF_ERROR(broken_);
  return base_->TryReceiveAny(peer, message, channel);
}

Status HostsCommunicator::Meet(const Offer& offer, Met* met) {
  DDL_RETURN_IF_ERROR(broken_);
  const Status status = MeetInTurn(offer, met);
  if (!status.ok()) barrier_.Break(status);
  return status;
}

Status HostsCommunicator::MeetInTurn(const Offer& offer, Met* met) {
  barrier_.Begin();
  HostGroup* group = memory_->group.get();
  const Pauses wait(0);
  Offer within = offer;
  within.count = 0;
  within.waiting = [&](const std::vector<bool>& here) {
    const auto first = std::find(here.begin(), here.end(), true) - here.begin();
    if (first == group->rank()) {
      std::vector<int> missing;
      for (int rank = 0; rank < group->size(); ++rank) {
        if (!here[rank]) missing.push_back(group->name(rank));
      }
      DDL_RETURN_IF_ERROR(barrier_.Report(missing, wait.elapsed_s()));
    }
    return barrier_.leads() ? barrier_.Heard() : Status();
  };
  Met outcome = Met::kAlike;
  DDL_RETURN_IF_ERROR(ddl::Meet(group, within, &outcome));
  if (barrier_.leads()) {
    // Another rank of this host may fail meanwhile.
    within.waiting = [group](const std::vector<bool>&) { return group->status(); };
    const Status met_without = barrier_.Meet(within, outcome, &outcome);
    if (!met_without.ok()) return group->Break(met_without, 0);
  }
  // What has come of it. The others wait for the leader, and tell it whether it may wait for ever.
  Offer told;
  told.leaving = offer.leaving;
  told.asks_nothing = true;
  told.limited = [] { return false; };
  told.title = offer.title;
  told.waiting = [&](const std::vector<bool>&) {
    if (offer.IsWithdrawn()) DDL_RETURN_IF_ERROR(barrier_.TakeBack());
    if (barrier_.leads()) return Status();
    return barrier_.ReportLimit(offer.IsLimited(), wait.elapsed_s());
  };
  told.withdraws = barrier_.leads() && outcome == Met::kWithdrawn;
  told.digest[0] = barrier_.leads() && outcome == Met::kDifferent;
  DDL_RETURN_IF_ERROR(ddl::Meet(group, told, met));
  if (barrier_.leads()) *met = outcome;
  return Status();
}

Status HostsCommunicator::Kept(Status status) {
  // At once for the others on this host, and for hosts that meet; those that wait for tensors find
  // out by waiting.
  if (!status.ok()) {
    broken_ = memory_->lanes->Break(status);
    barrier_.Break(broken_);
    base_->Break(broken_);
  }
  return broken_;
}

Status HostsCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                    int divisor) {
  return AllReduceN({{in, out, count}}, dtype, divisor);
}

Status HostsCommunicator::AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                                     int divisor) {
  DDL_RETURN_IF_ERROR(broken_);
  const TensorList row(tensors, static_cast<int64_t>(DTypeSize(dtype)));
  if (row.nbytes() == 0) return Status();
  return Kept(AllReduceRow(row, dtype, divisor));
}

Status HostsCommunicator::AllReduceRow(const TensorList& tensors, DType dtype, int divisor) {
  const int place = memory_->group->rank();
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  const int64_t hosts = 1 + *std::max_element(hosts_.begin(), hosts_.end());
  const Fragments fragments(tensors.nbytes(), shares_, memory_->group->size(),
                            std::max(kFragmentBytes, kFragmentBytesOfHost * hosts));
  const int64_t nbytes = std::min(fragments.size(), kFragments) * fragments.room();
  if (column_ && nbytes > static_cast<int64_t>(fragments_.size())) fragments_.resize(nbytes);
  const auto own = [&](int64_t fragment) {
    return fragments_.data() + fragment % kFragments * fragments.room();
  };
  // A host's sum of halves is rounded when it leaves the host, so it is divided before: else it
  // could be too large for a half where the average is not.
  const int within = IsHalf(dtype) ? divisor : 1;
  const auto between = [&](int64_t fragment) {
    return NetworkAllReduce(column_.get(), own(fragment), own(fragment),
                            fragments[fragment][place].count() / element, dtype, divisor / within,
                            fragments.share(place).count() / element);
  };
  const bool overlap = column_ && fragments.size() > 1;
  if (overlap && !network_) network_ = std::make_unique<Worker>("ddl-network");
  const NetworkUse use(network_.get(), column_.get());
  for (int64_t step = 0; step <= fragments.size(); ++step) {
    if (step < fragments.size()) {
      DDL_RETURN_IF_ERROR(Scatter(tensors, fragments[step], own(step), dtype, within));
      if (overlap) {
        network_->Begin([&between, step] { return between(step); });
      } else if (column_) {
        DDL_RETURN_IF_ERROR(between(step));
      }
    }
    if (step == 0) continue;
    if (overlap) DDL_RETURN_IF_ERROR(AwaitNetwork());
    DDL_RETURN_IF_ERROR(Gather(tensors, fragments[step - 1], own(step - 1)));
  }
  return Status();
}

Status HostsCommunicator::Scatter(const TensorList& tensors, const std::vector<Share>& fragment,
                                  char* own, DType dtype, int divisor) {
  return memory_->lanes->Run(Total(fragment), [&](HostGroup* group, int lane, int lanes) {
    const std::vector<Share> parts = CutEachAtLines(fragment, lanes, lane);
    char* const out = own + parts[group->rank()].begin - fragment[group->rank()].begin;
    return ReduceScatterInPieces(group, tensors, parts, out, dtype, divisor);
  });
}

Status HostsCommunicator::Gather(const TensorList& tensors, const std::vector<Share>& fragment,
                                 const char* own) {
  return memory_->lanes->Run(Total(fragment), [&](HostGroup* group, int lane, int lanes) {
    const std::vector<Share> parts = CutEachAtLines(fragment, lanes, lane);
    const char* const in = own + parts[group->rank()].begin - fragment[group->rank()].begin;
    return AllGatherInPieces(group, tensors, parts, in);
  });
}

// For the oldest fragment.
Status HostsCommunicator::AwaitNetwork() {
  Status status;
  while (!network_->Await(kLookAroundS, &status)) {
    DDL_RETURN_IF_ERROR(memory_->group->status());
  }
  return status;
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
  const int host = hosts_[root];
  const bool at_root = hosts_[rank()] == host;
  // The root's host has it first; its first rank passes it on.
  const auto place = at_root ? std::count(hosts_.begin(), hosts_.begin() + root, host) : 0;
  const auto between = [&] {
    return memory_->group->rank() == 0 ? TreeBroadcast(column_.get(), buffer, nbytes, host)
                                       : Status();
  };
  if (!at_root) DDL_RETURN_IF_ERROR(between());
  DDL_RETURN_IF_ERROR(
      memory_->lanes->Run(nbytes, [&](HostGroup* group, int lane, int lanes) {
        return BroadcastInPieces(group, buffer, nbytes, CutAtLines({0, nbytes}, lanes)[lane],
                                 static_cast<int>(place));
      }));
  return at_root ? between() : Status();
}

Status HostsCommunicator::AllGather(const void* in, void* out,
                                    const std::vector<int64_t>& nbytes) {
  DDL_RETURN_IF_ERROR(broken_);
  return Kept(base_->AllGather(in, out, nbytes));
}

}  // namespace ddl
