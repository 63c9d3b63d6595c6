#include "runtime/process_sets.h"

#include <algorithm>
#include <string>
#include <utility>

namespace ddl {

ProcessSets& ProcessSets::Get() {
  static ProcessSets* sets = new ProcessSets;  // as engines, see there
  return *sets;
}

Status ProcessSets::Add(int id, const std::vector<int>& ranks) {
  Topology all;
  if (!Engine::Get().Started(&all)) {
    return Status(Code::kFailedPrecondition, "Process sets need ddl.init() first.");
  }
  Set set{ranks, nullptr};
  if (std::find(ranks.begin(), ranks.end(), all.rank) != ranks.end()) {
    set.engine = new Engine(id, ranks);
    Topology own;
    DDL_RETURN_IF_ERROR(set.engine->Start(&own));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sets_[id] = std::move(set);
  return Status();
}

Status ProcessSets::Remove(int id) {
  Set set;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sets_.find(id);
    if (found == sets_.end()) {
      return Status(Code::kFailedPrecondition, "There is no process set " + std::to_string(id) + ".");
    }
    set = std::move(found->second);
    sets_.erase(found);
  }
  if (set.engine != nullptr) set.engine->Leave();
  return Status();
}

Status ProcessSets::Find(int id, Engine** engine) const {
  if (id == 0) {
    *engine = &Engine::Get();
    return Status();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) {
    return Status(Code::kInvalidInput,
                  "there is no process set " + std::to_string(id) + ". Add it first, on all ranks.");
  }
  *engine = found->second.engine;
  if (*engine != nullptr) return Status();
  std::string ranks;
  for (const int rank : found->second.ranks) {
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return Status(Code::kInvalidInput, "this rank is not of process set " + std::to_string(id) +
                                         ", which has ranks " + ranks +
                                         ". Call it on these ranks alone.");
}

void ProcessSets::BeginLeave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, set] : sets_) {
    if (set.engine != nullptr) set.engine->BeginLeave();
  }
}

void ProcessSets::RemoveAll() {
  std::map<int, Set> sets;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sets.swap(sets_);
  }
  for (auto set = sets.rbegin(); set != sets.rend(); ++set) {
    if (set->second.engine != nullptr) set->second.engine->Leave();
  }
}

}  // namespace ddl
