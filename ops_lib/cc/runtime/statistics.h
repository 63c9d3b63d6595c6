#ifndef DDL_RUNTIME_STATISTICS_H_
#define DDL_RUNTIME_STATISTICS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// What one rank has communicated. Plain bytes: ranks send it to rank 0 as it is.
struct RankStatistics {
  char host[64] = "";
  int64_t collectives = 0;
  int64_t failed = 0;  // of them, with an error; the figures below are of the others
  int64_t tensors = 0;
  int64_t bytes_reduced = 0;
  int64_t bytes_broadcast = 0;
  int64_t bytes_gathered = 0;
  double run_s = 0;       // from the start of the first collective to the end of the last
  double comm_s = 0;      // from the start of each to its end
  double wait_s = 0;      // of comm_s, until all ranks were there
  double max_wait_s = 0;  // for one collective
  // Of the collectives that took time after all were there, which small tensors do not.
  int64_t transfer_bytes = 0;
  double transfer_s = 0;
};

// Sums up the collectives of this rank. For each a few additions.
class Statistics {
 public:
  void Add(const CollectiveRecord& record);

  // So far. A host's name is cut to what fits.
  RankStatistics Result(const std::string& host) const;

 private:
  RankStatistics sums_;
  CollectiveRecord::Time first_start_, last_end_;
};

// A file of this rank with what it has communicated so far: who looks at the job while it runs sees
// what the statistics say at its end.
class StatisticsSoFar {
 public:
  // `directory`: where, as rank-<n>.communication. Without it, nowhere.
  void Open(const std::string& directory, int rank);

  // Writes the file at first, and again each 5 seconds: it may lie on a file system of the network,
  // and the others wait for the rank that writes.
  void Add(const Statistics& statistics, CollectiveRecord::Time now);

  // Replaces the file: an object with t (unix seconds), run_s, comm_s and wait_s. What cannot be
  // written is left out, for no training needs it.
  void Write(const Statistics& statistics);

 private:
  std::string path_;
  CollectiveRecord::Time due_;
};

// The rank that waited least: the others wait for it, because whoever comes last to a collective
// does not wait.
struct Straggler {
  int rank = 0;
  // How much less it waited than the others do on average, from 0 (they wait for each other alike)
  // to 1 (all waiting was for this rank).
  double share = 0;
};

// Of at least two ranks.
Straggler FindStraggler(const std::vector<RankStatistics>& ranks);

// One object: ranks, a list in the order of ranks, and straggler, null for one rank alone.
std::string StatisticsJson(const std::vector<RankStatistics>& ranks);

// The same for people: a line for each rank, and who is waited for.
std::string StatisticsTable(const std::vector<RankStatistics>& ranks);

// Empties the file, which stays so if the run does not end well. FailedPrecondition if it cannot be
// written.
Status PrepareStatisticsFile(const std::string& path);

// Internal if it cannot be written.
Status WriteStatisticsFile(const std::string& path, const std::string& text);

}  // namespace ddl

#endif  // DDL_RUNTIME_STATISTICS_H_
