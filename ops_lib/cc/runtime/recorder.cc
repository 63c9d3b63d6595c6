#include "runtime/recorder.h"

#include <unistd.h>

#include <cstdint>
#include <vector>

#include "core/log.h"

namespace ddl {
namespace {

constexpr char kRankMark[] = "{rank}";

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

Status Recorder::Open(const Config& config, Communicator* communicator) {
  communicator_ = communicator;
  host_ = HostName();
  timeline_path_ = config.timeline_path;
  log_info_ = config.log_info;
  so_far_.Open(config.record_dir, communicator_->rank());
  DDL_RETURN_IF_ERROR(OpenTimeline());
  if (communicator_->rank() != 0) return Status();
  if (!config.progress_path.empty()) DDL_RETURN_IF_ERROR(progress_.Open(config.progress_path));
  stats_path_ = config.stats_path;
  return stats_path_.empty() ? Status() : PrepareStatisticsFile(stats_path_);
}

Status Recorder::OpenTimeline() {
  const int rank = communicator_->rank(), size = communicator_->size();
  const size_t mark = timeline_path_.find(kRankMark);
  timeline_shared_ = !timeline_path_.empty() && mark == std::string::npos;
  if (mark != std::string::npos) {
    timeline_path_.replace(mark, sizeof(kRankMark) - 1, std::to_string(rank));
  }
  Status status;
  if (timeline_shared_ && communicator_->local_size() != size) {
    status = Status(Code::kFailedPrecondition,
                    "DDL_TIMELINE is '" + timeline_path_ +
                        "', but the ranks are on several hosts, which cannot append to one file. "
                        "Put {rank} into its name: each rank gets a file of its own.");
  } else if (timeline_shared_ ? rank == 0 : !timeline_path_.empty()) {
    status = Timeline::Create(timeline_path_);
  }
  // Nobody may append before the file is there; and all come, whatever they have set.
  if (size > 1) {
    int32_t votes[] = {timeline_shared_, !status.ok()};
    DDL_RETURN_IF_ERROR(communicator_->baseline()->AllReduce(votes, votes, 2, DType::kInt32));
    DDL_RETURN_IF_ERROR(status);
    if (votes[0] % size != 0) {
      return Status(Code::kFailedPrecondition,
                    "DDL_TIMELINE differs among the ranks. Give all of them the same file, or put "
                    "{rank} into its name where only some shall write one.");
    }
    if (votes[1] > 0) {
      return Status(Code::kFailedPrecondition,
                    "DDL_TIMELINE: another rank cannot write its file; it says why.");
    }
  }
  DDL_RETURN_IF_ERROR(status);
  return timeline_path_.empty() ? Status() : timeline_.Open(timeline_path_, rank, host_);
}

void Recorder::Add(const CollectiveRecord& record) {
  statistics_.Add(record);
  so_far_.Add(statistics_, record.end);
  progress_.Add(record);
  timeline_.Add(record);
}

void Recorder::Flush() {
  so_far_.Write(statistics_);
  progress_.Flush();
  timeline_.Flush();
}

void Recorder::Close(bool all_left) {
  // What others may still write to has no end.
  if (!timeline_shared_ || (all_left && communicator_->rank() == 0)) timeline_.End();
  if (!all_left) return;
  const Status status = GatherStatistics();
  if (!status.ok()) LogLine(communicator_->rank(), status.message());
}

Status Recorder::GatherStatistics() {
  const RankStatistics mine = statistics_.Result(host_);
  std::vector<RankStatistics> ranks(communicator_->size());
  if (ranks.size() == 1) {
    ranks[0] = mine;
  } else {
    DDL_RETURN_IF_ERROR(communicator_->AllGather(
        &mine, ranks.data(), std::vector<int64_t>(ranks.size(), sizeof(mine))));
  }
  if (communicator_->rank() != 0) return Status();
  if (log_info_) LogLine(0, StatisticsTable(ranks));
  return stats_path_.empty() ? Status() : WriteStatisticsFile(stats_path_, StatisticsJson(ranks));
}

}  // namespace ddl
