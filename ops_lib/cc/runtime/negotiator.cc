#include "runtime/negotiator.h"

#include <utility>

#include "runtime/description.h"

namespace ddl {
namespace {

constexpr size_t kMostRemembered = 100'000;

}  // namespace

Status Decide(const std::vector<std::string>& descriptions, const std::vector<bool>& ordered,
              bool* same) {
  *same = true;
  for (size_t rank = 1; rank < descriptions.size() && *same; ++rank) {
    *same = descriptions[rank] == descriptions[0] || (ordered[rank] && ordered[0]) ||
            Title(descriptions[rank]) == Title(descriptions[0]);
  }
  return *same ? Compare(descriptions) : Status();
}

void Negotiator::Add(Request request) {
  negotiates_ = negotiates_ || (!request.ordered && !alone_);
  pending_.push_back(std::move(request));
}

const Request* Negotiator::Show(bool patient) {
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
    std::string title = Title(request);
    // Only a prediction: a loop that names each of its rounds would fill the memory with it.
    if (next_.size() >= kMostRemembered) next_.clear();
    next_[last_] = {title, request.ordered};
    last_ = std::move(title);
  }
  return request;
}

void Negotiator::Follow(const std::vector<Turn>& order) {
  choice_.reset();
  if (order.empty()) return;
  choice_ = order[0];
  for (size_t i = 1; i < order.size(); ++i) next_[order[i - 1].title] = order[i];
}

std::vector<Turn> Negotiator::Order() const {
  std::vector<Turn> order;
  if (pending_.empty()) return order;
  const Request& shown = pending_[shown_];
  order.push_back({Title(shown), shown.ordered});
  for (const Request& request : pending_) {
    if (&request != &shown) order.push_back({Title(request), request.ordered});
  }
  return order;
}

std::deque<Request>::iterator Negotiator::Find(const Turn& turn) {
  for (auto request = pending_.begin(); request != pending_.end(); ++request) {
    if ((turn.ordered && request->ordered) || Title(*request) == turn.title) return request;
  }
  return pending_.end();
}

}  // namespace ddl
