#ifndef DDL_RUNTIME_REQUEST_QUEUE_H_
#define DDL_RUNTIME_REQUEST_QUEUE_H_

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// What identifies a request to other ranks, where they agree on an order.
struct RequestId {
  std::string title;  // Title of the request
  bool ordered = true;
  std::string stream;
};

// Whether two sessions, or two runs of a graph at once, have asked for what other ranks know by one
// name.
bool AreAmbiguous(const Request& one, const Request& other);

// The pending requests of this rank, and which of them it proposes next. It has no thread, no clock
// and knows nothing of the other ranks but what it is told.
//
// Ordered requests of one stream keep their order among themselves. All others may be overtaken,
// because the executors of two ranks start the same ops of a graph in different order. Where ranks
// propose different requests, rank 0 decides (Follow).
//
// What came after what is remembered, and expected the next time: so the ranks of a training
// propose the same from the second step on, though its ops become ready in another order in every
// step. Where everything is in one ordered stream, nothing is remembered and nothing expected.
class RequestQueue {
 public:
  // `alone`: there is no other rank whose order might differ.
  explicit RequestQueue(bool alone) : alone_(alone) {}

  void Add(Request request);
  bool empty() const { return pending_.empty(); }
  // In the order of submission.
  const std::deque<Request>& pending() const { return pending_; }

  // The request to propose: rank 0's choice if there is one, else the expected one, else the
  // oldest. Null if the choice is not pending; or, if `wait_for_expected`, the expected one.
  //
  // An ordered request that was submitted before an ordered choice of its stream comes in its
  // place: no wait will make them agree. Requests of one name take turns in the order of
  // submission.
  Request* Next(bool wait_for_expected);

  // Takes out the request that Next gave last, and remembers what it came after.
  Request Take();

  // Takes out all for which `wanted` says so, in their order.
  std::vector<Request> Extract(const std::function<bool(const Request&)>& wanted);

  // Rank 0 proposes the first of `order`, so this rank has to propose it too, and then expects the
  // rest. Empty: rank 0 has dropped its choice.
  void Follow(const std::vector<RequestId>& order);
  bool HasChoice() const { return choice_.has_value(); }
  const RequestId& choice() const { return *choice_; }

  // All that is pending, beginning with the request that Next gave last.
  std::vector<RequestId> Order() const;

 private:
  std::deque<Request>::iterator Find(const RequestId& id);

  const bool alone_;
  bool negotiates_ = false;  // a request has been here that is not of one ordered stream
  std::optional<std::string> stream_;  // of the first ordered request
  std::deque<Request> pending_;
  size_t current_ = 0;
  std::optional<RequestId> choice_;
  std::string last_;                                       // key of what was taken last
  std::unordered_map<std::string, RequestId> successors_;  // what came after it, by key
};

}  // namespace ddl

#endif  // DDL_RUNTIME_REQUEST_QUEUE_H_
