#ifndef DDL_RUNTIME_NEGOTIATOR_H_
#define DDL_RUNTIME_NEGOTIATOR_H_

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// A request by name: what ranks tell each other when they speak of order.
struct Turn {
  std::string title;  // Title of the request
  bool ordered = true;
  std::string stream;
};

// Keeps the requests that wait for their turn, and says which of them this rank shows next. It has
// no thread, no clock and knows nothing of the other ranks but what it is told.
//
// Ordered requests of one stream keep their order among themselves. All others may be overtaken, because the
// executors of two ranks start the same ops of a graph in different order. Where ranks show
// different requests, rank 0 decides (Follow).
//
// What came after what is remembered, and the next time expected: so the ranks of a training show
// the same from the second step on, though its ops become ready in another order in every step.
// Where everything is in one ordered stream, nothing is remembered and nothing expected.
class Negotiator {
 public:
  // `alone`: there is no other rank whose order might differ.
  explicit Negotiator(bool alone) : alone_(alone) {}

  void Add(Request request);
  bool empty() const { return pending_.empty(); }

  // The request to show: rank 0's choice if there is one, else the expected one, else the oldest.
  // Null if the choice is not pending; or, if `patient`, the expected one.
  //
  // An ordered request that was submitted before an ordered choice of its stream is shown in its
  // place: no wait will make them agree. Requests of one name take turns in the order of submission.
  Request* Show(bool patient);

  // Takes the request that was shown last out, and remembers what it came after.
  Request Take();

  // Takes all out for which `wanted` says so, in their order.
  std::vector<Request> Extract(const std::function<bool(const Request&)>& wanted);

  // Rank 0 shows the first of `order`, so this rank has to show it too, and then expects the rest.
  // Empty: there is no choice any more.
  void Follow(const std::vector<Turn>& order);
  bool HasChoice() const { return choice_.has_value(); }
  const Turn& choice() const { return *choice_; }

  // All that is pending, from the request that was shown last on.
  std::vector<Turn> Order() const;

 private:
  std::deque<Request>::iterator Find(const Turn& turn);

  const bool alone_;
  bool negotiates_ = false;  // a request has been here that is not of one ordered stream
  std::optional<std::string> stream_;  // of the first ordered request
  std::deque<Request> pending_;
  size_t shown_ = 0;
  std::optional<Turn> choice_;
  std::string last_;                            // key of what was taken last
  std::unordered_map<std::string, Turn> next_;  // what came after it, by key
};

}  // namespace ddl

#endif  // DDL_RUNTIME_NEGOTIATOR_H_
