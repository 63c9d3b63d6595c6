#include "runtime/timeline.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "check.h"

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A file name that is gone when the test is over.
class TemporaryFile {
 public:
  TemporaryFile() {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder ? folder : P_tmpdir) + "/ddl-timeline-XXXXXX";
    const int file = mkstemp(path_.data());
    CHECK(file >= 0, path_);
    close(file);
  }
  ~TemporaryFile() { unlink(path()); }

  const char* path() const { return path_.c_str(); }

  std::string Text() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

 private:
  std::string path_;
};

struct Step {
  const char* name = "total";
  int submitted_ms = 0, start_ms = 0, agreed_ms = 0, end_ms = 0;
  bool inlined = false;
  std::string error = {};
};

void Add(ddl::Timeline* timeline, const Step& step) {
  ddl::Request request;
  request.op_name = "AllReduceN";
  request.name = step.name;
  request.tensors.resize(2);
  request.submitted = ddl::CollectiveRecord::Time(milliseconds(step.submitted_ms));
  ddl::CollectiveRecord record{request};
  if (!step.error.empty()) record.status = ddl::Status(ddl::Code::kInternal, step.error);
  record.start = ddl::CollectiveRecord::Time(milliseconds(step.start_ms));
  record.agreed = ddl::CollectiveRecord::Time(milliseconds(step.agreed_ms));
  record.end = ddl::CollectiveRecord::Time(milliseconds(step.end_ms)) + std::chrono::nanoseconds(7);
  record.nbytes = 4'000'000'000;
  record.inlined = step.inlined;
  timeline->Add(record);
}

int Occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

void Has(const std::string& text, const std::string& part) {
  CHECK(text.find(part) != std::string::npos, "no " + part + " in " + text);
}

}  // namespace

TEST(timeline_shows_a_collective_and_its_parts) {
  const TemporaryFile file;
  ddl::Timeline timeline;
  CHECK(ddl::Timeline::Create(file.path()).ok(), "");
  CHECK(timeline.Open(file.path(), 3, "node1").ok(), "");
  Add(&timeline, {"grads/a", 100, 120, 150, 160});
  timeline.End();
  const std::string text = file.Text();
  const std::string process = "\"pid\":" + std::to_string(getpid());
  CHECK(text.rfind("[\n{", 0) == 0 && text.substr(text.size() - 4) == "}\n]\n", text);
  Has(text, "{\"name\":\"process_name\",\"ph\":\"M\"," + process +
                ",\"tid\":0,\"args\":{\"name\":\"rank 3 on node1\"}},\n");
  Has(text, "{\"name\":\"grads/a\",\"cat\":\"queued\",\"ph\":\"X\"," + process +
                ",\"tid\":2,\"ts\":100000.000,\"dur\":20000.000},\n");
  Has(text, "{\"name\":\"grads/a\",\"cat\":\"AllReduceN\",\"ph\":\"X\"," + process +
                ",\"tid\":1,\"ts\":120000.000,\"dur\":40000.007,\"args\":{\"n\":1,"
                "\"bytes\":4000000000,\"dtype\":\"float32\",\"tensors\":2}},\n");
  Has(text, "{\"name\":\"wait for others\",\"cat\":\"part\",\"ph\":\"X\"," + process +
                ",\"tid\":1,\"ts\":120000.000,\"dur\":30000.000},\n");
  Has(text, "{\"name\":\"reduce\",\"cat\":\"part\",\"ph\":\"X\"," + process +
                ",\"tid\":1,\"ts\":150000.000,\"dur\":10000.007},\n");
}

TEST(timeline_gives_requests_that_wait_together_rows_of_their_own) {
  const TemporaryFile file;
  ddl::Timeline timeline;
  CHECK(ddl::Timeline::Create(file.path()).ok(), "");
  CHECK(timeline.Open(file.path(), 0, "h").ok(), "");
  Add(&timeline, {"a", 0, 0, 5, 10});
  Add(&timeline, {"b", 1, 10, 12, 20});  // submitted while a runs
  Add(&timeline, {"c", 2, 20, 22, 30});  // while b waits: a second row
  Add(&timeline, {"d", 15, 30, 32, 40});  // b's row is free again
  timeline.End();
  const std::string text = file.Text();
  Has(text, "\"args\":{\"name\":\"queue 2\"}");
  CHECK(text.find("queue 3") == std::string::npos, text);
  Has(text, "{\"name\":\"b\",\"cat\":\"queued\",\"ph\":\"X\",\"pid\":" + std::to_string(getpid()) +
                ",\"tid\":2,\"ts\":1000.000,\"dur\":9000.000}");
  Has(text, "\"tid\":3,\"ts\":2000.000,\"dur\":18000.000}");
  Has(text, "\"tid\":2,\"ts\":15000.000,\"dur\":15000.000}");
}

TEST(timeline_shows_what_went_with_the_agreement_as_one_part) {
  const TemporaryFile file;
  ddl::Timeline timeline;
  CHECK(ddl::Timeline::Create(file.path()).ok(), "");
  CHECK(timeline.Open(file.path(), 0, "h").ok(), "");
  Add(&timeline, {"small", 0, 0, 5, 5, true});
  timeline.End();
  const std::string text = file.Text();
  CHECK(Occurrences(text, "\"cat\":\"part\"") == 1, text);
  Has(text, "{\"name\":\"wait and reduce\",");
}

TEST(timeline_escapes_names_and_shows_errors_at_once) {
  const TemporaryFile file;
  ddl::Timeline timeline;
  CHECK(ddl::Timeline::Create(file.path()).ok(), "");
  CHECK(timeline.Open(file.path(), 0, "h").ok(), "");
  Add(&timeline, {"a\"\\\n\x1f\xc3\xa9", 0, 0, 5, 5, false, "rank 1 sent \"x\""});
  const std::string text = file.Text();
  Has(text, "\"a\\\"\\\\\\u000a\\u001f\xc3\xa9\"");
  Has(text, "\"error\":\"rank 1 sent \\\"x\\\"\"");
}

TEST(timeline_writes_whole_batches_and_keeps_no_more_in_memory) {
  const TemporaryFile file;
  ddl::Timeline timeline;
  CHECK(ddl::Timeline::Create(file.path()).ok(), "");
  CHECK(timeline.Open(file.path(), 0, "h").ok(), "");
  const size_t begun = file.Text().size();
  // These times lie before the last write, so that only the size can be the reason to write.
  size_t added = 0;
  for (; file.Text().size() == begun && added < 1000; ++added) Add(&timeline, {});
  const std::string text = file.Text();
  CHECK(text.size() - begun >= ddl::Timeline::kBatchBytes, std::to_string(text.size()));
  CHECK(text.size() - begun < ddl::Timeline::kBatchBytes + 2000, std::to_string(text.size()));
  CHECK(Occurrences(text, "\"cat\":\"AllReduceN\"") == static_cast<int>(added), "");
  CHECK(text.substr(text.size() - 2) == ",\n", "");
  timeline.End();
}

TEST(timelines_of_two_ranks_share_a_file) {
  const TemporaryFile file;
  CHECK(ddl::Timeline::Create(file.path()).ok(), "");
  ddl::Timeline first, second;
  CHECK(first.Open(file.path(), 0, "h").ok() && second.Open(file.path(), 1, "h").ok(), "");
  Add(&first, {"a", 0, 0, 1, 2});
  Add(&second, {"b", 0, 0, 1, 2});
  second.Flush();
  first.End();
  const std::string text = file.Text();
  CHECK(text.find("rank 0 on h") < text.find("rank 1 on h"), text);
  CHECK(text.find("\"b\"") < text.find("\"a\""), text);
  CHECK(Occurrences(text, "]") == 1, text);
  CHECK(ddl::Timeline::Create(file.path()).ok() && file.Text() == "[\n", "a new run replaces it");
}

TEST(timeline_that_cannot_be_begun_is_an_error) {
  const ddl::Status missing = ddl::Timeline::Create("/nonexistent/timeline.json");
  CHECK(missing.code() == ddl::Code::kFailedPrecondition, missing.message());
  Has(missing.message(), "DDL_TIMELINE: cannot write '/nonexistent/timeline.json': No such file");
  const ddl::Status full = ddl::Timeline::Create("/dev/full");
  Has(full.message(), "No space left on device");
}

TEST(timeline_on_a_full_disk_says_so_once_and_stops) {
  const TemporaryFile said;
  const int before = dup(STDERR_FILENO);
  CHECK(std::freopen(said.path(), "a", stderr) != nullptr, "");
  {
    ddl::Timeline timeline;
    CHECK(timeline.Open("/dev/full", 2, "h").ok(), "the training goes on");
    for (int i = 0; i < 1000; ++i) Add(&timeline, {});
    timeline.End();
  }
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  const std::string text = said.Text();
  CHECK(text == "ddl: rank 2: DDL_TIMELINE: write failed: No space left on device. "
                "The timeline ends here.\n",
        text);
}
