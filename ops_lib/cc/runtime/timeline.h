#ifndef DDL_RUNTIME_TIMELINE_H_
#define DDL_RUNTIME_TIMELINE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// Writes what the engine did and when, for chrome://tracing and ui.perfetto.dev. A process of the
// trace is a rank. Its first row has the collectives, each with two parts in it: the wait for the
// other ranks, and the transfer. The rows below, "queue n", show collectives from their submission
// to their start: as many as were in the queue at once. A submission under a running collective is
// an overlap of communication with what TensorFlow computes.
//
// Ranks of one host may share a file: each batch of whole lines is one write to its end. A trace
// that was cut off, because a rank was killed, lacks its last second and the closing bracket;
// viewers accept that. Times are CLOCK_MONOTONIC, which the processes of one host share.
//
// One collective makes 0.8 KB; docs/ops.md says what it costs. At most kBatchBytes wait in memory,
// and not longer than until the first collective a second later.
//
// Source: Trace Event Format (Google, 2016), JSON array format, complete and metadata events.
class Timeline {
 public:
  static constexpr size_t kBatchBytes = 64 << 10;

  Timeline() = default;
  ~Timeline();

  // Begins a trace: replaces the file. FailedPrecondition if it cannot be written.
  static Status Create(const std::string& path);

  // Joins the trace that this rank or another has begun. FailedPrecondition as above.
  Status Open(const std::string& path, int rank, const std::string& host);

  void Add(const CollectiveRecord& record);

  // Writes what waits in memory.
  void Flush();

  // Ends the trace; only the last rank to write to it may.
  void End();

 private:
  void Metadata(const char* what, int row, const std::string& arguments);
  void Row(int row, const std::string& name);
  void Span(std::string_view name, std::string_view category, int row, CollectiveRecord::Time begin,
            CollectiveRecord::Time end);
  void AddQueued(const CollectiveRecord& record);

  int file_ = -1;
  int rank_ = 0;
  std::string process_;  // "pid":4711
  std::string batch_;
  std::vector<CollectiveRecord::Time> queue_rows_;  // when each row below the first is free again
  int64_t collectives_ = 0;
  std::chrono::steady_clock::time_point written_at_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_TIMELINE_H_
