#include "runtime/request_queue.h"

#include <utility>

#include "runtime/description.h"

namespace ddl {
namespace {

constexpr size_t kMaxSuccessors = 100'000;

RequestId IdOf(const Request& request) { return {Title(request), request.ordered, request.stream}; }

// Requests of one title may come from several streams.
std::string KeyOf(const RequestId& id) { return id.stream + "\n" + id.title; }

}  // namespace

bool AreAmbiguous(const Request& one, const Request& other) {
  const bool two_sessions =
      one.session != 0 && other.session != 0 && one.session != other.session;
  const bool two_runs = one.run != 0 && other.run != 0 && one.run != other.run;
  return (two_sessions || two_runs) && !one.ordered && !other.ordered &&
         one.stream == other.stream && Title(one) == Title(other);
}

void RequestQueue::Add(Request request) {
  if (request.ordered && !stream_) stream_ = request.stream;
  negotiates_ = negotiates_ || (!alone_ && (!request.ordered || request.stream != *stream_));
  pending_.push_back(std::move(request));
}

Request* RequestQueue::Next(bool wait_for_expected) {
  auto next = pending_.begin();
  if (choice_) {
    next = Find(*choice_);
    if (next == pending_.end()) return nullptr;
  } else if (pending_.empty()) {
    return nullptr;
  } else if (negotiates_) {
    if (const auto expected = successors_.find(last_); expected != successors_.end()) {
      next = Find(expected->second);
      if (next == pending_.end()) {
        if (wait_for_expected) return nullptr;
        next = pending_.begin();
      }
    }
  }
  current_ = next - pending_.begin();
  return &*next;
}

Request RequestQueue::Take() {
  const auto next = pending_.begin() + current_;
  Request request = std::move(*next);
  pending_.erase(next);
  current_ = 0;
  choice_.reset();
  if (negotiates_) {
    RequestId taken = IdOf(request);
    // Only a prediction: a loop that names each of its rounds would fill the memory with it.
    if (successors_.size() >= kMaxSuccessors) successors_.clear();
    successors_[last_] = taken;
    last_ = KeyOf(taken);
  }
  return request;
}

std::vector<Request> RequestQueue::Extract(const std::function<bool(const Request&)>& wanted) {
  std::vector<Request> extracted;
  std::deque<Request> kept;
  for (Request& request : pending_) {
    if (wanted(request)) {
      extracted.push_back(std::move(request));
    } else {
      kept.push_back(std::move(request));
    }
  }
  pending_.swap(kept);
  current_ = 0;
  return extracted;
}

void RequestQueue::Follow(const std::vector<RequestId>& order) {
  choice_.reset();
  if (order.empty()) return;
  choice_ = order[0];
  for (size_t i = 1; i < order.size(); ++i) successors_[KeyOf(order[i - 1])] = order[i];
}

std::vector<RequestId> RequestQueue::Order() const {
  std::vector<RequestId> order;
  if (pending_.empty()) return order;
  const Request& next = pending_[current_];
  order.push_back(IdOf(next));
  for (const Request& request : pending_) {
    if (&request != &next) order.push_back(IdOf(request));
  }
  return order;
}

std::deque<Request>::iterator RequestQueue::Find(const RequestId& id) {
  for (auto request = pending_.begin(); request != pending_.end(); ++request) {
    if (request->stream != id.stream) continue;
    if ((id.ordered && request->ordered) || Title(*request) == id.title) {
      return request;
    }
  }
  return pending_.end();
}

}  // namespace ddl
