#include "core/log.h"
#include "runtime/engine.h"
#include "runtime/teams.h"

namespace ddl {

Teams& ProcessTeams() {
  // Never destroyed: the engine's thread may still complete a reduction when the process exits.
  static Teams* teams = new Teams([](Request request) { Engine::Get().Submit(std::move(request)); },
                                  [](const std::string& line) {
                                    Topology topology;
                                    if (Engine::Get().Started(&topology) && topology.rank == 0) {
                                      LogLine(0, line);
                                    }
                                  });
  return *teams;
}

}  // namespace ddl
