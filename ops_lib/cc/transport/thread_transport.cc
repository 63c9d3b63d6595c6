#include "transport/thread_transport.h"

#include <chrono>
#include <cstring>
#include <string>

#include "core/stall.h"

namespace ddl {

class ThreadTransport : public Transport {
 public:
  ThreadTransport(ThreadNetwork* network, int rank) : network_(*network), rank_(rank) {}

  ~ThreadTransport() override {
    std::lock_guard<std::mutex> lock(network_.mutex_);
    // Nobody may touch this rank's memory from now on.
    for (int peer = 0; peer < size(); ++peer) {
      network_.link(rank_, peer).sent.clear();
      network_.link(peer, rank_).awaited.clear();
    }
    network_.ended_[rank_] = true;
    network_.changed_.notify_all();
  }

  int rank() const override { return rank_; }
  int size() const override { return network_.size_; }

  Status Send(int peer, const void* bytes, int64_t nbytes) override {
    DDL_RETURN_IF_ERROR(broken_);
    // Only read, whatever the type says.
    sends_.push_back(Post(const_cast<void*>(bytes), nbytes, peer));
    if (nbytes == 0) return Status();
    std::lock_guard<std::mutex> lock(network_.mutex_);
    network_.link(rank_, peer).sent.push_back(sends_.back());
    return KeepError(network_.Match(rank_, peer));
  }

  Status Receive(int peer, void* bytes, int64_t nbytes) override {
    DDL_RETURN_IF_ERROR(broken_);
    receives_.push_back(Post(bytes, nbytes, peer));
    if (nbytes == 0) return Status();
    std::lock_guard<std::mutex> lock(network_.mutex_);
    network_.link(peer, rank_).awaited.push_back(receives_.back());
    return KeepError(network_.Match(peer, rank_));
  }

  Status AwaitReceive() override {
    DDL_RETURN_IF_ERROR(broken_);
    DDL_RETURN_IF_ERROR(Await(*receives_.front()));
    receives_.pop_front();
    return Status();
  }

  void Interrupt() override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    interrupted_ = true;
    network_.changed_.notify_all();
  }

  Status AwaitSends(int64_t pending) override {
    DDL_RETURN_IF_ERROR(broken_);
    while (static_cast<int64_t>(sends_.size()) > pending) {
      DDL_RETURN_IF_ERROR(Await(*sends_.front()));
      sends_.pop_front();
    }
    return Status();
  }

 private:
  using Message = ThreadNetwork::Message;

  static std::shared_ptr<Message> Post(void* bytes, int64_t nbytes, int peer) {
    auto message = std::make_shared<Message>();
    message->bytes = static_cast<char*>(bytes);
    message->nbytes = nbytes;
    message->peer = peer;
    message->done = nbytes == 0;
    return message;
  }

  Status Await(const Message& message) {
    std::unique_lock<std::mutex> lock(network_.mutex_);
    const auto settled = [&] {
      return message.done || network_.ended_[message.peer] || interrupted_;
    };
    const bool in_time = network_.changed_.wait_for(
        lock, std::chrono::duration<double>(network_.timeout_s_), settled);
    if (message.done) return Status();
    if (interrupted_) return KeepError(Interrupted());
    const std::string who = "rank " + std::to_string(message.peer);
    if (in_time) {
      return KeepError(Status(Code::kAborted, who + " has ended in the middle of a collective."));
    }
    return KeepError(Status(Code::kDeadlineExceeded,
                            who +
                                " stopped in the middle of a collective and did not go on within " +
                                Seconds(network_.timeout_s_) + "."));
  }

  Status KeepError(Status status) { return broken_ = std::move(status); }

  ThreadNetwork& network_;
  const int rank_;
  bool interrupted_ = false;  // guarded by the network's mutex
  std::deque<std::shared_ptr<Message>> sends_, receives_;
};

ThreadNetwork::ThreadNetwork(int size, double timeout_s)
    : size_(size), timeout_s_(timeout_s), links_(size * size), ended_(size), sent_nbytes_(size) {}

std::unique_ptr<Transport> ThreadNetwork::Join(int rank) {
  return std::make_unique<ThreadTransport>(this, rank);
}

int64_t ThreadNetwork::SentBytes(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  return sent_nbytes_[rank];
}

Status ThreadNetwork::Match(int from, int to) {
  Link& both = link(from, to);
  while (!both.sent.empty() && !both.awaited.empty()) {
    Message& sent = *both.sent.front();
    Message& awaited = *both.awaited.front();
    if (sent.nbytes != awaited.nbytes) {
      return Status(Code::kInternal, "rank " + std::to_string(from) + " sent " +
                                         std::to_string(sent.nbytes) + " bytes where rank " +
                                         std::to_string(to) + " expected " +
                                         std::to_string(awaited.nbytes) + ".");
    }
    std::memcpy(awaited.bytes, sent.bytes, sent.nbytes);
    sent.done = awaited.done = true;
    sent_nbytes_[from] += sent.nbytes;
    both.sent.pop_front();
    both.awaited.pop_front();
    changed_.notify_all();
  }
  return Status();
}

}  // namespace ddl
