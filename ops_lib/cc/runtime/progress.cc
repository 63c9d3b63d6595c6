#include "runtime/progress.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/log.h"
#include "core/numbers.h"

namespace ddl {
namespace {

// A loop that names each of its rounds would fill the memory.
constexpr size_t kMostNames = 10'000;

}  // namespace

ProgressWriter::~ProgressWriter() {
  if (file_ >= 0) close(file_);
}

Status ProgressWriter::Open(const std::string& path) {
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file_ >= 0) return Status();
  return Status(Code::kFailedPrecondition, "DDL_PROGRESS: cannot append to '" + path +
                                               "': " + std::strerror(errno) +
                                               ". Name a file in a folder that is writable.");
}

void ProgressWriter::Add(const CollectiveRecord& record) {
  if (file_ < 0 || !record.status.ok()) return;
  const Request& request = record.request;
  if (request.op_name == "AllReduceN" || request.op_name == "AllReduceAtStep" ||
      request.op_name == "TeamGradients") {
    if (runs_.size() >= kMostNames) runs_.clear();
    step_ = std::max(step_, ++runs_[request.name]);
  }
  if (request.kind == Request::Kind::kAllReduce ||
      request.kind == Request::Kind::kReduceScatter) {
    bytes_reduced_ += record.nbytes;
  }
  comm_s_ += std::chrono::duration<double>(record.end - record.start).count();
  wait_s_ += std::chrono::duration<double>(record.agreed - record.start).count();
  unwritten_ = true;
  if (record.end - written_at_ >= std::chrono::seconds(1)) Flush();
}

void ProgressWriter::Flush() {
  if (file_ < 0 || !unwritten_) return;
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::string line = Format(
      "{\"t\": %.3f, \"source\": \"ops\", \"step\": %lld, \"comm_s\": %.6f, "
      "\"wait_s\": %.6f, \"bytes_reduced\": %lld}\n",
      now, static_cast<long long>(step_), comm_s_, wait_s_, static_cast<long long>(bytes_reduced_));
  if (write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    // A full disk must not end a training that needs nothing from this file.
    LogLine(0, std::string("DDL_PROGRESS: write failed: ") + std::strerror(errno) +
                   ". No more progress lines.");
    close(file_);
    file_ = -1;
  }
  unwritten_ = false;
  written_at_ = std::chrono::steady_clock::now();
}

}  // namespace ddl
