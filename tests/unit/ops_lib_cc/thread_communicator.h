#ifndef DDL_TESTS_THREAD_COMMUNICATOR_H_
#define DDL_TESTS_THREAD_COMMUNICATOR_H_

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "algorithms/pieces.h"
#include "comm/communicator.h"
#include "comm/dissemination_barrier.h"
#include "transport/host_group.h"

// The messages under way between ranks that are threads. None overtakes another.
class Mailboxes {
 public:
  using Clock = std::chrono::steady_clock;

  // How long a message is under way; called by its sender, which may stand still in it. Set before
  // there are any.
  std::function<Clock::duration(int from, int to, const std::string& message)> takes;

  void Put(int from, int to, ddl::MessageTag tag, std::string message) {
    const Clock::time_point ready = Clock::now() + (takes ? takes(from, to, message) : kNoTime);
    const std::lock_guard<std::mutex> lock(mutex_);
    boxes_[{from, to, tag}].push_back({ready, std::move(message)});
  }

  bool Take(int from, int to, ddl::MessageTag tag, std::string* message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<std::pair<Clock::time_point, std::string>>& box = boxes_[{from, to, tag}];
    if (box.empty() || box.front().first > Clock::now()) return false;
    *message = std::move(box.front().second);
    box.pop_front();
    return true;
  }

  // How many messages nobody has taken.
  size_t Left() {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t left = 0;
    for (const auto& box : boxes_) left += box.second.size();
    return left;
  }

 private:
  static constexpr Clock::duration kNoTime{0};

  std::mutex mutex_;
  std::map<std::tuple<int, int, ddl::MessageTag>,
           std::deque<std::pair<Clock::time_point, std::string>>>
      boxes_;
};

// Ranks that are threads, as runtime/ and comm/ see them.
class ThreadCommunicator : public ddl::Communicator {
 public:
  // `mailboxes`: for all ranks; null where none sends messages. `shares_memory`: else barriers
  // are by messages, as if each rank were a host of its own.
  explicit ThreadCommunicator(ddl::HostGroup* group, Mailboxes* mailboxes = nullptr,
                              bool shares_memory = false)
      : group_(group), mailboxes_(mailboxes), shares_memory_(shares_memory) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  int local_rank() const override { return rank(); }
  int local_size() const override { return size(); }
  const char* TransportName() const override { return "threads"; }

  using ddl::Communicator::Send;
  using ddl::Communicator::TryReceive;
  ddl::Status Send(int peer, std::string message, ddl::MessageTag tag) override {
    if (mailboxes_ == nullptr) return Unused();
    mailboxes_->Put(rank(), peer, tag, std::move(message));
    return ddl::Status();
  }
  ddl::Status TryReceive(int peer, std::string* message, bool* received,
                         ddl::MessageTag tag) override {
    if (mailboxes_ == nullptr) return Unused();
    *received = mailboxes_->Take(peer, rank(), tag, message);
    return ddl::Status();
  }
  ddl::Status TryReceiveAny(int* peer, std::string* message, ddl::MessageTag tag) override {
    if (mailboxes_ == nullptr) return Unused();
    for (*peer = size() - 1; *peer >= 0; --*peer) {
      if (mailboxes_->Take(*peer, rank(), tag, message)) break;
    }
    return ddl::Status();
  }
  ddl::Status Flush() override { return ddl::Status(); }
  bool ReducesInline() const override { return shares_memory_; }
  ddl::Status Barrier(const ddl::Arrival& arrival, ddl::BarrierResult* result) override {
    if (shares_memory_) return ddl::HostBarrier(group_, arrival, result);
    if (!barrier_) {
      std::vector<std::vector<int>> alone;
      for (int peer = 0; peer < size(); ++peer) alone.push_back({peer});
      barrier_ = std::make_unique<ddl::DisseminationBarrier>(this, alone, group_->timeout_s());
    }
    barrier_->Begin();
    return barrier_->ArriveAndWait(arrival, ddl::BarrierResult::kMatch, result);
  }
  ddl::Status AllReduce(const void* in, void* out, int64_t count, ddl::DType dtype,
                        ddl::Reduction reduction) override {
    return ddl::AllReduceInPieces(group_, in, out, count, dtype, reduction);
  }
  void Break(const ddl::Status& reason) override { (void)group_->Break(reason, 0); }
  bool HasAbandonedMessages() const override { return false; }
  ddl::Status AllReduceN(const std::vector<ddl::TensorSpan>& tensors, ddl::DType dtype,
                         ddl::Reduction reduction) override {
    return ddl::AllReduceInPieces(group_, tensors, dtype, reduction);
  }
  ddl::Baseline* baseline() override { return nullptr; }  // no test asks for it
  ddl::Status Broadcast(void* buffer, int64_t nbytes, int root) override {
    return ddl::BroadcastInPieces(group_, buffer, nbytes, root);
  }
  ddl::Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override {
    int64_t own = 0;
    for (int peer = 0; peer < rank(); ++peer) own += nbytes[peer];
    if (in != static_cast<char*>(out) + own) {
      std::memcpy(static_cast<char*>(out) + own, in, nbytes[rank()]);
    }
    return ddl::AllGatherInPieces(group_, static_cast<char*>(out) + own, out, nbytes);
  }
  ddl::Status ReduceScatterN(const std::vector<ddl::SharedTensor>& tensors, ddl::DType dtype,
                             ddl::Reduction reduction) override {
    const ddl::ShareList list = ddl::ShareList::Scattered(tensors, rank());
    return ddl::ReduceScatterInPieces(group_, list.tensors(), list.ranges(), dtype, reduction);
  }
  ddl::Status AllToAll(const void* in, void* out, const ddl::Exchange& exchange) override {
    std::vector<int> all(size());
    std::iota(all.begin(), all.end(), 0);
    return ddl::AllToAllInPieces(group_, in, out, exchange.SentTo(all), exchange.ReceivedFrom(all),
                                 exchange.Largest(all));
  }

 private:
  static ddl::Status Unused() { return {ddl::Code::kInternal, "not part of this test"}; }

  ddl::HostGroup* group_;
  Mailboxes* mailboxes_;
  const bool shares_memory_;
  std::unique_ptr<ddl::DisseminationBarrier> barrier_;
};

#endif  // DDL_TESTS_THREAD_COMMUNICATOR_H_
