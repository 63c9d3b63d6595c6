#ifndef DDL_RUNTIME_PROGRESS_H_
#define DDL_RUNTIME_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// Appends one JSON line a second to a file that several writers share, so each line is one write:
//   {"t": unix seconds, "source": "ops", "step": n, "comm_s": seconds, "wait_s": seconds,
//    "bytes_reduced": n}
// A step is one run of the AllReduceN that ran most often. comm_s counts the time from a request's
// start to its end; wait_s is the part of it until all ranks were there.
class ProgressWriter {
 public:
  ProgressWriter() = default;
  ~ProgressWriter();

  // FailedPrecondition if the file cannot be opened for appending.
  Status Open(const std::string& path);

  // Counts one collective, if it succeeded; writes a line if the last one is a second old.
  void Add(const CollectiveRecord& record);

  // Writes what has not been written yet.
  void Flush();

 private:
  int file_ = -1;
  std::unordered_map<std::string, int64_t> runs_;
  int64_t step_ = 0;
  int64_t bytes_reduced_ = 0;
  double comm_s_ = 0;
  double wait_s_ = 0;
  bool unwritten_ = false;
  std::chrono::steady_clock::time_point written_at_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_PROGRESS_H_
