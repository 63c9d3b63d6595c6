#include "runtime/progress.h"
#include "runtime/statistics.h"

#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "check.h"

namespace {

using std::chrono::milliseconds;

// One collective that starts at `at_ms`, waits, and moves its bytes in `transfer_ms`.
void Pass(ddl::Statistics* statistics, ddl::Request::Kind kind, int tensors, int64_t nbytes,
          int at_ms, int wait_ms, int transfer_ms, bool inlined = false, bool fails = false) {
  ddl::Request request;
  request.kind = kind;
  request.tensors.resize(tensors);
  ddl::CollectiveRecord record{request};
  if (fails) record.status = ddl::Status(ddl::Code::kInvalidArgument, "shapes differ");
  record.start = ddl::CollectiveRecord::Time(milliseconds(at_ms));
  record.agreed = record.start + milliseconds(wait_ms);
  record.end = record.agreed + milliseconds(transfer_ms);
  record.nbytes = nbytes;
  record.inlined = inlined;
  statistics->Add(record);
}

ddl::RankStatistics Waited(double wait_s) {
  ddl::RankStatistics rank;
  rank.wait_s = wait_s;
  return rank;
}

std::string Read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

TEST(statistics_add_up_what_a_rank_did) {
  using Kind = ddl::Request::Kind;
  ddl::Statistics statistics;
  Pass(&statistics, Kind::kBroadcast, 1, 100, 5000, 10, 4);
  Pass(&statistics, Kind::kAllReduce, 3, 6'000'000, 5100, 30, 2);
  Pass(&statistics, Kind::kAllReduce, 2, 8, 5200, 7, 0, true);
  Pass(&statistics, Kind::kAllGather, 1, 5'999'900, 5300, 1, 6);
  Pass(&statistics, Kind::kAllReduce, 9, 1000, 5400, 600, 0, false, true);
  const ddl::RankStatistics sums = statistics.Result("node1");
  const std::string json = ddl::StatisticsJson({sums});
  const std::string expected =
      "{\"straggler\": null,\n \"ranks\": [\n"
      "  {\"rank\": 0, \"host\": \"node1\", \"collectives\": 5, \"failed\": 1, \"tensors\": 7, "
      "\"bytes_reduced\": 6000008, \"bytes_broadcast\": 100, \"bytes_gathered\": 5999900, "
      "\"run_s\": 1.000000, \"comm_s\": 0.060000, \"wait_s\": 0.048000, \"max_wait_s\": 0.030000, "
      "\"algbw_gb_s\": 1.0000}\n ]}\n";
  CHECK(json == expected, json);
}

TEST(statistics_of_no_collective_are_zeros) {
  const std::string json = ddl::StatisticsJson({ddl::Statistics().Result("h")});
  CHECK(json.find("\"run_s\": 0.000000") != std::string::npos, json);
  CHECK(json.find("\"algbw_gb_s\": 0.0000") != std::string::npos, json);
  CHECK(ddl::FindStraggler({ddl::RankStatistics(), ddl::RankStatistics()}).share == 0, "");
}

TEST(statistics_name_the_rank_that_waited_least) {
  const ddl::Straggler all = ddl::FindStraggler({Waited(2), Waited(2), Waited(0)});
  CHECK(all.rank == 2 && all.share == 1, std::to_string(all.share));
  const ddl::Straggler most = ddl::FindStraggler({Waited(3), Waited(1), Waited(5)});
  CHECK(most.rank == 1 && most.share == 0.75, std::to_string(most.share));
  const ddl::Straggler none = ddl::FindStraggler({Waited(4), Waited(4)});
  CHECK(none.share == 0, std::to_string(none.share));
  const std::string table = ddl::StatisticsTable({Waited(3), Waited(1), Waited(5)});
  CHECK(table.find("for rank 1: it waited 75 % less") != std::string::npos, table);
  const std::string json = ddl::StatisticsJson({Waited(3), Waited(1), Waited(5)});
  CHECK(json.find("{\"rank\": 1, \"share\": 0.7500}") != std::string::npos, json);
}

TEST(statistics_cut_a_host_name_that_is_too_long) {
  const ddl::RankStatistics rank = ddl::Statistics().Result(std::string(300, 'h'));
  CHECK(std::string(rank.host) == std::string(sizeof(rank.host) - 1, 'h'), rank.host);
}

TEST(statistics_that_cannot_be_written_say_so) {
  const ddl::Status missing = ddl::PrepareStatisticsFile("/nonexistent/stats.json");
  CHECK(missing.code() == ddl::Code::kFailedPrecondition, missing.message());
  CHECK(missing.message().find("'/nonexistent/stats.json': No such file") != std::string::npos,
        missing.message());
  const ddl::Status full = ddl::WriteStatisticsFile("/dev/full", "{}");
  CHECK(full.code() == ddl::Code::kInternal, full.message());
  CHECK(full.message().find("No space left") != std::string::npos, full.message());
}

TEST(statistics_so_far_are_written_now_and_then_and_at_the_end) {
  const char* folder = getenv("TMPDIR");
  std::string directory = std::string(folder ? folder : P_tmpdir) + "/ddl-statistics-XXXXXX";
  CHECK(mkdtemp(directory.data()) != nullptr, directory);
  const std::string path = directory + "/rank-3.communication";
  ddl::StatisticsSoFar so_far;
  so_far.Open(directory, 3);
  ddl::Statistics statistics;
  so_far.Write(statistics);
  CHECK(Read(path).empty(), "nothing was communicated: " + Read(path));
  const auto pass = [&](int at_ms) {
    Pass(&statistics, ddl::Request::Kind::kAllReduce, 1, 8, at_ms, 30, 20);
    so_far.Add(statistics, ddl::CollectiveRecord::Time(milliseconds(at_ms + 50)));
    return Read(path);
  };
  const std::string first = pass(5000);
  const std::string expected = "\"run_s\": 0.050000, \"comm_s\": 0.050000, \"wait_s\": 0.030000}\n";
  CHECK(first.find(expected) != std::string::npos, first);
  CHECK(pass(9999) == first, Read(path));
  const std::string second = pass(10000);
  CHECK(second.find("\"run_s\": 5.050000, \"comm_s\": 0.150000") != std::string::npos, second);
  CHECK(pass(10100) == second, Read(path));
  so_far.Write(statistics);
  CHECK(Read(path).find("\"run_s\": 5.150000") != std::string::npos, Read(path));
  std::remove(path.c_str());
  CHECK(rmdir(directory.c_str()) == 0, "something else is left");
  // Nowhere, and where nothing can be written: no training needs it.
  ddl::StatisticsSoFar().Write(statistics);
  so_far.Open("/nonexistent", 0);
  so_far.Write(statistics);
}

TEST(progress_is_a_line_of_json) {
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder ? folder : P_tmpdir) + "/ddl-progress-XXXXXX";
  const int file = mkstemp(path.data());
  CHECK(file >= 0, path);
  close(file);
  ddl::Request request;
  request.op_name = "AllReduceN";
  ddl::CollectiveRecord record{request};
  record.agreed = record.start + milliseconds(250);
  record.end = record.start + milliseconds(1500);
  record.nbytes = 8;
  ddl::ProgressWriter progress;
  CHECK(progress.Open(path).ok(), path);
  progress.Add(record);
  const std::string line = Read(path);
  const std::string after = ", \"source\": \"ops\", \"step\": 1, \"comm_s\": 1.500000, "
                            "\"wait_s\": 0.250000, \"bytes_reduced\": 8}\n";
  const size_t at = line.find(after);
  CHECK(at != std::string::npos && at + after.size() == line.size(), line);
  CHECK(line.rfind("{\"t\": ", 0) == 0 && line[at - 4] == '.', line);
  std::remove(path.c_str());
}
