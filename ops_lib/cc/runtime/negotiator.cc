#include "runtime/negotiator.h"

#include <utility>

#include "runtime/description.h"

namespace ddl {
namespace {

constexpr size_t kMostRemembered = 100'000;

Turn TurnOf(const Request& request) {
  return {Title(request), request.ordered, request.stream};
}

// Requests of one title may come from several streams.
std::string Key(const Turn& turn) { return turn.stream + "\n" + turn.title; }

}  // namespace

void Negotiator::Add(Request request) {
  if (request.ordered && !stream_) stream_ = request.stream;
  negotiates_ = negotiates_ || (!alone_ && (!request.ordered || request.stream != *stream_));
  pending_.push_back(std::move(request));
}

Request* Negotiator::Show(bool patient) {
  auto shown = pending_.begin();
  if (choice_) {
    shown = Find(*choice_);
    if (shown == pending_.end()) return nullptr;
  } else if (pending_.empty()) {
    return nullptr;
  } else if (negotiates_) {
    if (const auto expected = next_.find(last_); expected != next_.end()) {
      shown = Find(expected->second);
      if (shown == pending_.end()) {
        if (patient) return nullptr;
        shown = pending_.begin();
      }
    }
  }
  shown_ = shown - pending_.begin();
  return &*shown;
}

Request Negotiator::Take() {
  const auto shown = pending_.begin() + shown_;
  Request request = std::move(*shown);
  pending_.erase(shown);
  shown_ = 0;
  choice_.reset();
  if (negotiates_) {
    Turn taken = TurnOf(request);
    // Only a prediction: a loop that names each of its rounds would fill the memory with it.
    if (next_.size() >= kMostRemembered) next_.clear();
    next_[last_] = taken;
    last_ = Key(taken);
  }
  return request;
}

std::vector<Request> Negotiator::Extract(const std::function<bool(const Request&)>& wanted) {
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
  shown_ = 0;
  return extracted;
}

void Negotiator::Follow(const std::vector<Turn>& order) {
  choice_.reset();
  if (order.empty()) return;
  choice_ = order[0];
  for (size_t i = 1; i < order.size(); ++i) next_[Key(order[i - 1])] = order[i];
}

std::vector<Turn> Negotiator::Order() const {
  std::vector<Turn> order;
  if (pending_.empty()) return order;
  const Request& shown = pending_[shown_];
  order.push_back(TurnOf(shown));
  for (const Request& request : pending_) {
    if (&request != &shown) order.push_back(TurnOf(request));
  }
  return order;
}

std::deque<Request>::iterator Negotiator::Find(const Turn& turn) {
  for (auto request = pending_.begin(); request != pending_.end(); ++request) {
    if (request->stream != turn.stream) continue;
    if ((turn.ordered && request->ordered) || Title(*request) == turn.title) {
      return request;
    }
  }
  return pending_.end();
}

}  // namespace ddl
