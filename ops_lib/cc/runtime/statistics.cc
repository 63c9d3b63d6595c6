#include "runtime/statistics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "core/numbers.h"

namespace ddl {
namespace {

constexpr std::chrono::seconds kSoFar(5);

double SecondsBetween(CollectiveRecord::Time begin, CollectiveRecord::Time end) {
  return std::chrono::duration<double>(end - begin).count();
}

double AlgBwGbS(const RankStatistics& rank) {
  return rank.transfer_s > 0 ? static_cast<double>(rank.transfer_bytes) / rank.transfer_s / 1e9
                             : 0.0;
}

}  // namespace

void Statistics::Add(const CollectiveRecord& record) {
  if (sums_.collectives++ == 0) first_start_ = record.start;
  last_end_ = record.end;
  if (!record.status.ok()) {
    ++sums_.failed;
    return;
  }
  sums_.tensors += static_cast<int64_t>(record.request.tensors.size());
  switch (record.request.kind) {
    case Request::Kind::kReduceScatter:
    case Request::Kind::kAllReduce: sums_.bytes_reduced += record.nbytes; break;
    case Request::Kind::kBroadcast: sums_.bytes_broadcast += record.nbytes; break;
    case Request::Kind::kAllToAll:
    case Request::Kind::kAllGather: sums_.bytes_gathered += record.nbytes; break;
    default: break;
  }
  const double wait_s = SecondsBetween(record.start, record.agreed);
  sums_.comm_s += SecondsBetween(record.start, record.end);
  sums_.wait_s += wait_s;
  sums_.max_wait_s = std::max(sums_.max_wait_s, wait_s);
  if (!record.inlined) {
    sums_.transfer_bytes += record.nbytes;
    sums_.transfer_s += SecondsBetween(record.agreed, record.end);
  }
}

RankStatistics Statistics::Result(const std::string& host) const {
  RankStatistics result = sums_;
  std::snprintf(result.host, sizeof(result.host), "%s", host.c_str());
  result.run_s = SecondsBetween(first_start_, last_end_);
  return result;
}

void StatisticsSoFar::Open(const std::string& directory, int rank) {
  if (directory.empty()) return;
  path_ = directory + "/rank-" + std::to_string(rank) + ".communication";
}

void StatisticsSoFar::Add(const Statistics& statistics, CollectiveRecord::Time now) {
  if (path_.empty() || now < due_) return;
  due_ = now + kSoFar;
  Write(statistics);
}

void StatisticsSoFar::Write(const Statistics& statistics) {
  if (path_.empty()) return;
  const RankStatistics sums = statistics.Result("");
  if (sums.collectives == 0) return;
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::string partial = path_ + "-partial";
  const std::string text =
      Format("{\"t\": %.3f, \"run_s\": %.6f, \"comm_s\": %.6f, \"wait_s\": %.6f}\n", now, sums.run_s,
             sums.comm_s, sums.wait_s);
  const int file = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return;
  const bool whole = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  if (whole) std::rename(partial.c_str(), path_.c_str());
}

Straggler FindStraggler(const std::vector<RankStatistics>& ranks) {
  Straggler straggler;
  double total_s = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    total_s += ranks[rank].wait_s;
    if (ranks[rank].wait_s < ranks[straggler.rank].wait_s) straggler.rank = static_cast<int>(rank);
  }
  const double least_s = ranks[straggler.rank].wait_s;
  const double others_s = (total_s - least_s) / static_cast<double>(ranks.size() - 1);
  if (others_s > 0) straggler.share = 1 - least_s / others_s;
  return straggler;
}

std::string StatisticsJson(const std::vector<RankStatistics>& ranks) {
  std::string text = "{\"straggler\": ";
  if (ranks.size() < 2) {
    text += "null";
  } else {
    const Straggler straggler = FindStraggler(ranks);
    text += Format("{\"rank\": %d, \"share\": %.4f}", straggler.rank, straggler.share);
  }
  text += ",\n \"ranks\": [";
  for (size_t i = 0; i < ranks.size(); ++i) {
    const RankStatistics& rank = ranks[i];
    text += Format("%s\n  {\"rank\": %zu, \"host\": \"%s\", \"collectives\": %lld, "
                   "\"failed\": %lld, \"tensors\": %lld, ",
                   i == 0 ? "" : ",", i, rank.host, static_cast<long long>(rank.collectives),
                   static_cast<long long>(rank.failed), static_cast<long long>(rank.tensors));
    text += Format("\"bytes_reduced\": %lld, \"bytes_broadcast\": %lld, \"bytes_gathered\": %lld, ",
                   static_cast<long long>(rank.bytes_reduced),
                   static_cast<long long>(rank.bytes_broadcast),
                   static_cast<long long>(rank.bytes_gathered));
    text += Format("\"run_s\": %.6f, \"comm_s\": %.6f, \"wait_s\": %.6f, \"max_wait_s\": %.6f, "
                   "\"algbw_gb_s\": %.4f}",
                   rank.run_s, rank.comm_s, rank.wait_s, rank.max_wait_s, AlgBwGbS(rank));
  }
  return text + "\n ]}\n";
}

std::string StatisticsTable(const std::vector<RankStatistics>& ranks) {
  std::string text = "communication of this run:\n";
  text += "  rank  collectives  MB reduced  time %    comm s    wait s  longest s    GB/s  host\n";
  for (size_t i = 0; i < ranks.size(); ++i) {
    const RankStatistics& rank = ranks[i];
    text += Format("%6zu %12lld %11.1f %7.1f %9.2f %9.2f %10.2f %7.2f  %s\n", i,
                   static_cast<long long>(rank.collectives),
                   static_cast<double>(rank.bytes_reduced) / 1e6,
                   rank.run_s > 0 ? 100 * rank.comm_s / rank.run_s : 0.0, rank.comm_s, rank.wait_s,
                   rank.max_wait_s, AlgBwGbS(rank), rank.host);
  }
  if (ranks.size() < 2) return text;
  const Straggler straggler = FindStraggler(ranks);
  return text + Format("  The others waited most for rank %d: it waited %.0f %% less than they did "
                       "on average.",
                       straggler.rank, 100 * straggler.share);
}

Status PrepareStatisticsFile(const std::string& path) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) {
    return Status(Code::kFailedPrecondition, "DDL_STATS: cannot write '" + path +
                                                 "': " + std::strerror(errno) +
                                                 ". Name a file in a folder that is writable.");
  }
  close(file);
  return Status();
}

Status WriteStatisticsFile(const std::string& path, const std::string& text) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const ssize_t written = file < 0 ? -1 : write(file, text.data(), text.size());
  const int error = written < 0 ? errno : ENOSPC;
  if (file >= 0) close(file);
  if (written == static_cast<ssize_t>(text.size())) return Status();
  return Status(Code::kInternal, "DDL_STATS: cannot write '" + path +
                                     "': " + std::strerror(error) + ". The run has no statistics.");
}

}  // namespace ddl
