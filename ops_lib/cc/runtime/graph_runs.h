#ifndef DDL_RUNTIME_GRAPH_RUNS_H_
#define DDL_RUNTIME_GRAPH_RUNS_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/status.h"
#include "runtime/cancelled_run.h"
#include "runtime/request.h"
#include "runtime/request_queue.h"

namespace ddl {

// The runs of graphs whose collectives a rank is asked for: which have failed, and which of them
// other ranks have cancelled. A run fails whole, because TensorFlow ends it at its first error:
// what waits and what will yet be submitted of it.
class GraphRuns {
 public:
  using Clock = std::chrono::steady_clock;

  // `queue` must outlive this object. `most_held`: see HeldUntil.
  GraphRuns(RequestQueue* queue, Clock::duration most_held);

  // Puts it into the queue; or completes it with an error, where its run has failed or this rank
  // joins: the others get zeros of that rank, whatever else it is asked for.
  void Add(Request request);

  // All ranks run a collective, of this run here; 0: of none.
  void Ran(int64_t run);

  // Nothing where it is 0, which is no run, or has failed already.
  void Fail(int64_t run, const Status& status);
  bool HasFailed(int64_t run) const;

  // The run of a request, which is pending or was the last to run, as other ranks know it. Without
  // position and without anything pending, others have nothing of it.
  CancelledRun Identify(const Request& request) const;

  // Fails the run that others have cancelled. If nothing of it was submitted here yet, it fails
  // when something is. Until then what is known by name alone, comes from the same stream and is
  // the first of its run is held: it may be of that one, and a later one of the same name could be
  // pending elsewhere.
  void CancelElsewhere(const CancelledRun& run);

  // When what is held is taken for a part of that run.
  std::optional<Clock::time_point> HeldUntil() const;
  // Takes it for that.
  void FailHeld();
  // The same of what this rank has cancelled of it by itself.
  void DropHeld();
  // Nothing that others have cancelled will come any more.
  void AwaitNothing();

 private:
  bool IsJoining() const;
  // Of the last collective that the run has had; -1: of none.
  int64_t PositionOf(int64_t run) const;
  // Whether it is of the awaited run. What cannot come any more is struck out.
  bool IsOf(const Request& request, CancelledRun* awaited) const;
  // For what a request has to be held; the end if for nothing.
  std::vector<CancelledRun>::iterator HoldingOf(const Request& request);
  void Hold(Request request);
  // Adds again what was held.
  void Release();

  struct FailedRun {
    int64_t run;
    Status status;
  };

  RequestQueue* queue_;
  const Clock::duration most_held_;
  std::deque<FailedRun> failed_;  // the newest
  std::vector<int64_t> ran_;      // runs of the newest collectives, a ring
  int64_t ran_count_ = 0;
  std::vector<CancelledRun> awaited_;  // of which nothing has come here
  std::vector<Request> held_;
  Clock::time_point held_since_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_GRAPH_RUNS_H_
