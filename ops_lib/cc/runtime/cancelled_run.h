#ifndef DDL_RUNTIME_CANCELLED_RUN_H_
#define DDL_RUNTIME_CANCELLED_RUN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/request_queue.h"

namespace ddl {

// A run of a graph that ranks have cancelled, in the form in which the others know theirs by it:
// the numbers that TensorFlow gives to runs differ from rank to rank.
struct CancelledRun {
  struct Pending {
    RequestId id;
    // What comes before it, of other runs: of its stream where it is ordered, else of its name.
    int64_t ahead = 0;
  };

  // Of the last collective that the run has had, counted over all that the ranks have run. -1: none.
  int64_t position = -1;
  // If it has had none: what was pending of it; of an ordered stream, or a name, only the first.
  std::vector<Pending> pending;
  std::string reason;      // a sentence for the other ranks
  std::vector<int> ranks;  // that have cancelled it by themselves
};

// What identifies the runs, without reasons and ranks: the same text on ranks that have cancelled
// the same ones.
std::string Identity(const std::vector<CancelledRun>& runs);

std::string Encode(const std::vector<CancelledRun>& runs);
// Reads what Encode wrote at `*at`, and moves that behind it.
std::vector<CancelledRun> DecodeCancelledRuns(const std::string& text, size_t* at);

// That of `runs` which is `run`, as another rank has cancelled it; their end if there is none.
//
// Both ranks may have had other collectives pending. Then it is the one that shares a stream: a
// thread of the program has one run at a time. (Threads of TensorFlow 1 share one, and their runs
// are taken for each other here if several are cancelled at once.)
std::vector<CancelledRun>::iterator FindSame(std::vector<CancelledRun>* runs,
                                             const CancelledRun& run);

// Adds one, or the ranks and what was pending of it where it is there.
void Merge(const CancelledRun& run, std::vector<CancelledRun>* runs);

}  // namespace ddl

#endif  // DDL_RUNTIME_CANCELLED_RUN_H_
