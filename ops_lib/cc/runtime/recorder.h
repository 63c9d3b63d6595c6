#ifndef DDL_RUNTIME_RECORDER_H_
#define DDL_RUNTIME_RECORDER_H_

#include <string>

#include "comm/communicator.h"
#include "core/config.h"
#include "core/status.h"
#include "runtime/progress.h"
#include "runtime/request.h"
#include "runtime/statistics.h"
#include "runtime/timeline.h"

namespace ddl {

// Tells progress, statistics and timeline about each collective. The engine's thread uses it.
class Recorder {
 public:
  // Collective. `communicator` must live until Close. FailedPrecondition if a file cannot be
  // written, or if the ranks cannot share the timeline's.
  Status Open(const Config& config, Communicator* communicator);

  void Add(const CollectiveRecord& record);

  // Writes what is still in memory. To be called before this rank leaves the group: whoever ends
  // the timeline must come last.
  void Flush();

  // `all_left`: every rank has left the group, so all of them call this. Then it is collective:
  // rank 0 gets the statistics of all and writes them. An error is a line in the log.
  void Close(bool all_left);

 private:
  Status OpenTimeline();
  Status GatherStatistics();

  Communicator* communicator_ = nullptr;
  std::string host_;
  std::string timeline_path_;
  bool timeline_shared_ = false;  // with the other ranks, all on one host
  std::string stats_path_;
  bool log_info_ = false;
  ProgressWriter progress_;
  Statistics statistics_;
  StatisticsSoFar so_far_;
  Timeline timeline_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_RECORDER_H_
