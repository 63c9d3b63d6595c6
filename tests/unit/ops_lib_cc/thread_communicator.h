#ifndef DDL_TESTS_THREAD_COMMUNICATOR_H_
#define DDL_TESTS_THREAD_COMMUNICATOR_H_

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/pieces.h"
#include "comm/communicator.h"
#include "transport/host_group.h"

// The messages under way between ranks that are threads. None overtakes another.
class Mailboxes {
 public:
  using Clock = std::chrono::steady_clock;

  // How long a message is under way. Set before there are any.
  std::function<Clock::duration(int from, int to, const std::string& message)> takes;

  void Put(int from, int to, std::string message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Clock::time_point ready = Clock::now() + (takes ? takes(from, to, message) : kNoTime);
    boxes_[{from, to}].push_back({ready, std::move(message)});
  }

  bool Take(int from, int to, std::string* message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<std::pair<Clock::time_point, std::string>>& box = boxes_[{from, to}];
    if (box.empty() || box.front().first > Clock::now()) return false;
    *message = std::move(box.front().second);
    box.pop_front();
    return true;
  }

 private:
  static constexpr Clock::duration kNoTime{0};

  std::mutex mutex_;
  std::map<std::pair<int, int>, std::deque<std::pair<Clock::time_point, std::string>>> boxes_;
};

// Ranks that are threads, as runtime/ and comm/ see them.
class ThreadCommunicator : public ddl::Communicator {
 public:
  // `mailboxes`: for all ranks; null where none sends messages.
  explicit ThreadCommunicator(ddl::HostGroup* group, Mailboxes* mailboxes = nullptr,
                              bool meets = false)
      : group_(group), mailboxes_(mailboxes), meets_(meets) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  int local_rank() const override { return rank(); }
  int local_size() const override { return size(); }
  const char* Means() const override { return "threads"; }

  ddl::Status Send(int peer, std::string message) override {
    if (mailboxes_ == nullptr) return Unused();
    mailboxes_->Put(rank(), peer, std::move(message));
    return ddl::Status();
  }
  ddl::Status TryReceive(int peer, std::string* message, bool* received) override {
    if (mailboxes_ == nullptr) return Unused();
    *received = mailboxes_->Take(peer, rank(), message);
    return ddl::Status();
  }
  bool CanMeet() const override { return meets_; }
  ddl::Status Meet(const ddl::Offer& offer, ddl::Met* met) override {
    return meets_ ? ddl::Meet(group_, offer, met) : Unused();
  }
  ddl::Status AllReduce(const void* in, void* out, int64_t count, ddl::DType dtype,
                        int divisor) override {
    return ddl::AllReduceInPieces(group_, in, out, count, dtype, divisor);
  }
  void Break(const ddl::Status& reason) override { (void)group_->Break(reason, 0); }
  ddl::Status AllReduceN(const std::vector<ddl::TensorSpan>& tensors, ddl::DType dtype,
                         int divisor) override {
    return ddl::AllReduceInPieces(group_, tensors, dtype, divisor);
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

 private:
  static ddl::Status Unused() { return {ddl::Code::kInternal, "not part of this test"}; }

  ddl::HostGroup* group_;
  Mailboxes* mailboxes_;
  const bool meets_;
};

#endif  // DDL_TESTS_THREAD_COMMUNICATOR_H_
