#ifndef DDL_RUNTIME_PROCESS_SETS_H_
#define DDL_RUNTIME_PROCESS_SETS_H_

#include <map>
#include <mutex>
#include <vector>

#include "core/status.h"
#include "runtime/engine.h"

namespace ddl {

// Subsets of the ranks, each with collectives of its own that run at the same time as those of the
// others: an engine of its own, with its own thread, messages and shared memory. Set 0 is all ranks,
// and always there. Ranks of a set are numbered from 0 on in their order.
//
// A set's engine is never destroyed, as that of all ranks is not.
class ProcessSets {
 public:
  static ProcessSets& Get();

  // Starts set `id` of these ranks, more than 0 and in ascending order, and waits until it is up. Every
  // rank calls it, with the same arguments, while no other set is added or removed; those of the set
  // wait for each other. FailedPrecondition before the start of all ranks; else what went wrong.
  Status Add(int id, const std::vector<int>& ranks);

  // Ends set `id` when all that was asked of it is done and all its ranks have called this.
  // FailedPrecondition if there is none.
  Status Remove(int id);

  // The engine of a set. InvalidInput where there is no such set, or this rank is not of it.
  Status Find(int id, Engine** engine) const;

  // Ends all sets: BeginLeave tells the other ranks, RemoveAll waits for them.
  void BeginLeave();
  void RemoveAll();

 private:
  struct Set {
    std::vector<int> ranks;
    Engine* engine = nullptr;  // null: this rank is not of it
  };

  mutable std::mutex mutex_;  // guards sets_
  std::map<int, Set> sets_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_PROCESS_SETS_H_
