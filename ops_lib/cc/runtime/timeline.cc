#include "runtime/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

#include "core/dtype.h"
#include "core/log.h"

namespace ddl {
namespace {

constexpr int kCollectivesRow = 1;  // 0 is the idle thread to some viewers

void AppendNumber(std::string* text, int64_t number) {
  char digits[20];
  const auto end = std::to_chars(digits, digits + sizeof(digits), number);
  text->append(digits, end.ptr);
}

// Microseconds with three decimals, as the format wants them.
void AppendMicroseconds(std::string* text, std::chrono::steady_clock::duration duration) {
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
  AppendNumber(text, ns / 1000);
  const int64_t rest = ns % 1000;
  const char decimals[] = {'.', static_cast<char>('0' + rest / 100),
                           static_cast<char>('0' + rest / 10 % 10),
                           static_cast<char>('0' + rest % 10)};
  text->append(decimals, sizeof(decimals));
}

// A JSON string. Names are UTF-8 as they come from TensorFlow.
void AppendQuoted(std::string* text, std::string_view value) {
  text->push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text->push_back('\\');
      text->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      const char escape[] = {'\\', 'u', '0', '0', static_cast<char>('0' + (c >> 4)),
                             kDigits[c & 15]};
      text->append(escape, sizeof(escape));
    } else {
      text->push_back(c);
    }
  }
  text->push_back('"');
}

const char* TransferOf(Request::Kind kind) {
  switch (kind) {
    case Request::Kind::kBroadcast: return "broadcast";
    case Request::Kind::kAllReduce: return "reduce";
    case Request::Kind::kAllGather: return "gather";
    case Request::Kind::kReduceScatter: return "reduce and scatter";
    case Request::Kind::kAllToAll: return "exchange";
    default: return "";
  }
}

Status CannotWrite(const std::string& path) {
  return Status(Code::kFailedPrecondition, "DDL_TIMELINE: cannot write '" + path +
                                               "': " + std::strerror(errno) +
                                               ". Name a file in a folder that is writable.");
}

}  // namespace

Timeline::~Timeline() {
  if (file_ >= 0) close(file_);
}

Status Timeline::Create(const std::string& path) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return CannotWrite(path);
  Status status;
  if (write(file, "[\n", 2) != 2) status = CannotWrite(path);
  close(file);
  return status;
}

Status Timeline::Open(const std::string& path, int rank, const std::string& host) {
  file_ = open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file_ < 0) return CannotWrite(path);
  rank_ = rank;
  process_ = "\"pid\":" + std::to_string(getpid());
  batch_.reserve(kBatchBytes + (4 << 10));
  std::string name;
  AppendQuoted(&name, "rank " + std::to_string(rank) + " on " + host);
  Metadata("process_name", 0, "\"name\":" + name);
  Metadata("process_sort_index", 0, "\"sort_index\":" + std::to_string(rank));
  Row(kCollectivesRow, "collectives");
  Flush();
  return Status();
}

void Timeline::Add(const CollectiveRecord& record) {
  if (file_ < 0) return;
  AddQueued(record);
  const Request& request = record.request;
  Span(request.name, request.op_name, kCollectivesRow, record.start, record.end);
  batch_ += ",\"args\":{\"n\":";
  AppendNumber(&batch_, ++collectives_);
  batch_ += ",\"bytes\":";
  AppendNumber(&batch_, record.nbytes);
  batch_ += ",\"dtype\":\"";
  batch_ += DTypeName(request.dtype);
  batch_ += "\",\"tensors\":";
  AppendNumber(&batch_, static_cast<int64_t>(request.tensors.size()));
  if (!record.status.ok()) {
    batch_ += ",\"error\":";
    AppendQuoted(&batch_, record.status.message());
  }
  batch_ += "}},\n";
  const char* const waits = !record.inlined                              ? "wait for others"
                            : request.kind == Request::Kind::kBroadcast ? "wait and broadcast"
                                                                        : "wait and reduce";
  Span(waits, "part", kCollectivesRow, record.start, record.agreed);
  batch_ += "},\n";
  if (!record.inlined && record.agreed < record.end) {
    Span(TransferOf(request.kind), "part", kCollectivesRow, record.agreed, record.end);
    batch_ += "},\n";
  }
  // After an error the job may end in any way.
  if (batch_.size() >= kBatchBytes || !record.status.ok() ||
      record.end - written_at_ >= std::chrono::seconds(1)) {
    Flush();
  }
}

void Timeline::AddQueued(const CollectiveRecord& record) {
  const CollectiveRecord::Time submitted = record.request.submitted;
  size_t row = 0;
  while (row < queue_rows_.size() && queue_rows_[row] > submitted) ++row;
  if (row == queue_rows_.size()) {
    queue_rows_.emplace_back();
    Row(kCollectivesRow + 1 + static_cast<int>(row), "queue " + std::to_string(row + 1));
  }
  queue_rows_[row] = record.start;
  Span(record.request.name, "queued", kCollectivesRow + 1 + static_cast<int>(row), submitted,
       record.start);
  batch_ += "},\n";
}

void Timeline::Span(std::string_view name, std::string_view category, int row,
                    CollectiveRecord::Time begin, CollectiveRecord::Time end) {
  batch_ += "{\"name\":";
  AppendQuoted(&batch_, name);
  batch_ += ",\"cat\":\"";
  batch_ += category;
  batch_ += "\",\"ph\":\"X\",";
  batch_ += process_;
  batch_ += ",\"tid\":";
  AppendNumber(&batch_, row);
  batch_ += ",\"ts\":";
  AppendMicroseconds(&batch_, begin.time_since_epoch());
  batch_ += ",\"dur\":";
  AppendMicroseconds(&batch_, end - begin);
}

void Timeline::Metadata(const char* what, int row, const std::string& arguments) {
  batch_ += std::string("{\"name\":\"") + what + "\",\"ph\":\"M\"," + process_ +
            ",\"tid\":" + std::to_string(row) + ",\"args\":{" + arguments + "}},\n";
}

void Timeline::Row(int row, const std::string& name) {
  Metadata("thread_name", row, "\"name\":\"" + name + "\"");
  Metadata("thread_sort_index", row, "\"sort_index\":" + std::to_string(row));
}

void Timeline::Flush() {
  if (file_ < 0) return;
  written_at_ = std::chrono::steady_clock::now();
  const ssize_t nbytes = static_cast<ssize_t>(batch_.size());
  const ssize_t written = write(file_, batch_.data(), nbytes);
  if (written != nbytes) {
    // A full disk must not end a training that needs nothing from this file.
    LogLine(rank_, std::string("DDL_TIMELINE: write failed: ") +
                       std::strerror(written < 0 ? errno : ENOSPC) + ". The timeline ends here.");
    close(file_);
    file_ = -1;
  }
  batch_.clear();
}

void Timeline::End() {
  if (file_ < 0) return;
  // JSON wants a last element without a comma behind it. This one says nothing new.
  Metadata("process_sort_index", 0, "\"sort_index\":" + std::to_string(rank_));
  batch_.replace(batch_.size() - 2, 2, "\n]\n");
  Flush();
  if (file_ >= 0) close(file_);
  file_ = -1;
}

}  // namespace ddl
