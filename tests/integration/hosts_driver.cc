// Collectives of the ranks of one job, below the engine. argv: what to do.
//   check          every collective with many dtypes and sizes; checks every element
//   reduce N R     sums N float32 R times
//   broadcast N R  broadcasts N bytes R times
//   exchange N R   rank 0 sends rank 1 N bytes R times, and after each all sum up a number
//   stop           rank 1 comes 1.5 s late, or later; each says what it gets, and what afterwards
// Each rank prints how it reaches the others, then "ok" or the first error.

#include <mpi.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi_connect.h"
#include "core/half.h"

namespace {

ddl::Communicator* group;

void Say(const std::string& what) {
  std::printf("<%d> %s\n", group->rank(), what.c_str());
  std::fflush(stdout);
}

[[noreturn]] void Fail(const std::string& what) {
  Say(what);
  MPI_Abort(MPI_COMM_WORLD, 3);
  std::abort();
}

void Require(const ddl::Status& status) {
  if (!status.ok()) Fail(status.message());
}

int64_t ValueOf(int64_t index, int rank) { return index % 1009 * group->size() + rank; }

template <typename T>
void CheckSum(ddl::DType dtype, int64_t count, bool in_place, int divisor) {
  std::vector<T> in(count), out(count, T(-1));
  for (int64_t i = 0; i < count; ++i) in[i] = static_cast<T>(ValueOf(i, group->rank()));
  T* to = in_place ? in.data() : out.data();
  Require(group->AllReduce(in.data(), to, count, dtype, divisor));
  for (int64_t i = 0; i < count; ++i) {
    int64_t total = 0;
    for (int rank = 0; rank < group->size(); ++rank) total += ValueOf(i, rank);
    if (to[i] != static_cast<T>(total) / static_cast<T>(divisor)) {
      Fail(std::string(ddl::DTypeName(dtype)) + "[" + std::to_string(count) + "]: [" +
           std::to_string(i) + "] is " + std::to_string(to[i]));
    }
  }
}

// Rank 0 has 1024 where the others have 3/8: rounded after each addition, the sum would stay 1024.
void CheckHalves(ddl::DType dtype, int64_t count) {
  std::vector<float> wide(count);
  for (int64_t i = 0; i < count; ++i) {
    wide[i] = i % 3 > 0 ? static_cast<float>(i % 100) : group->rank() == 0 ? 1024.0f : 0.375f;
  }
  std::vector<uint16_t> halves(count), want(count);
  ddl::Narrow(wide.data(), halves.data(), count, dtype);
  const float others = static_cast<float>(group->size() - 1);
  for (int64_t i = 0; i < count; ++i) {
    wide[i] = i % 3 > 0 ? static_cast<float>(i % 100) * (others + 1) : 1024.0f + 0.375f * others;
  }
  ddl::Narrow(wide.data(), want.data(), count, dtype);
  Require(group->AllReduce(halves.data(), halves.data(), count, dtype, 1));
  const std::string name = ddl::DTypeName(dtype);
  if (std::string(group->TransportName()).find("between hosts") == std::string::npos) {
    if (halves != want) Fail(name + " is not rounded once");
    return;
  }
  // The parts of the hosts are rounded as well.
  const float unit = dtype == ddl::DType::kFloat16 ? 0x1p-11f : 0x1p-8f;
  std::vector<float> got(count);
  ddl::Widen(halves.data(), got.data(), count, dtype);
  for (int64_t i = 0; i < count; ++i) {
    if (std::fabs(got[i] - wide[i]) > 2.01f * unit * wide[i]) Fail(name + " is further off than two roundings");
  }
}

void CheckBroadcast(int64_t nbytes, int root) {
  std::vector<char> bytes(nbytes, -1);
  for (int64_t i = 0; group->rank() == root && i < nbytes; ++i) bytes[i] = static_cast<char>(i % 101);
  Require(group->Broadcast(bytes.data(), nbytes, root));
  for (int64_t i = 0; i < nbytes; ++i) {
    if (bytes[i] != i % 101) Fail("broadcast of " + std::to_string(nbytes) + " bytes");
  }
}

void CheckGather(int64_t unit) {
  std::vector<int64_t> nbytes;
  std::vector<char> want;
  for (int rank = 0; rank < group->size(); ++rank) {
    nbytes.push_back((rank * 5 + 1) % 4 * unit);
    for (int64_t i = 0; i < nbytes.back(); ++i) want.push_back(static_cast<char>((i + rank) % 101));
  }
  std::vector<char> in(nbytes[group->rank()]), out(want.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<char>((i + group->rank()) % 101);
  Require(group->AllGather(in.data(), out.data(), nbytes));
  if (out != want) Fail("gather of " + std::to_string(want.size()) + " bytes");
}

void Check() {
  const int size = group->size();
  for (const int64_t count : {0, 1, 2, 7, 1001, 70'001, 1'100'003}) {
    CheckSum<float>(ddl::DType::kFloat32, count, count % 2 == 0, 1);
    CheckSum<float>(ddl::DType::kFloat32, count, count % 2 == 1, size);
    CheckHalves(ddl::DType::kFloat16, count);
    CheckHalves(ddl::DType::kBfloat16, count);
    for (int root = 0; root < size; ++root) CheckBroadcast(count, root);
    CheckGather(count / 7);
  }
  CheckSum<double>(ddl::DType::kFloat64, 12'345, true, size);
  CheckSum<int32_t>(ddl::DType::kInt32, 12'345, false, size);
  CheckSum<int64_t>(ddl::DType::kInt64, 12'345, true, 1);
  CheckSum<float>(ddl::DType::kFloat32, 9'000'001, true, 1);  // more than a piece
  CheckHalves(ddl::DType::kBfloat16, 9'000'001);
  CheckBroadcast(40'000'001, size - 1);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  {
    ddl::Config config;
    std::unique_ptr<ddl::Communicator> made;
    ddl::Status status = ddl::ReadConfig(&config);
    if (status.ok()) status = ddl::Connect(config, 0, {}, &made);
    if (!status.ok()) {
      std::printf("%s\n", status.message().c_str());
      std::fflush(stdout);
      MPI_Abort(MPI_COMM_WORLD, 3);
    }
    group = made.get();
    Say("local rank " + std::to_string(group->local_rank()) + " of " +
        std::to_string(group->local_size()) + ", over " + group->TransportName());
    const std::string what = argv[1];
    const int64_t n = argc > 3 ? std::atoll(argv[2]) : 0;
    const int runs = argc > 3 ? std::atoi(argv[3]) : 0;
    if (what == "check") Check();
    if (what == "reduce") {
      std::vector<float> in(n, 1.0f), out(n);
      for (int run = 0; run < runs; ++run) {
        Require(group->AllReduce(in.data(), out.data(), n, ddl::DType::kFloat32, 1));
      }
    }
    if (what == "broadcast") {
      std::vector<char> bytes(n);
      for (int run = 0; run < runs; ++run) Require(group->Broadcast(bytes.data(), n, 0));
    }
    if (what == "exchange") {
      const int rank = group->rank(), size = group->size();
      std::vector<int64_t> nbytes(static_cast<size_t>(size) * size, 0);
      nbytes[1] = n;
      const std::vector<char> in(rank == 0 ? n : 0, 7);
      for (int run = 0; run < runs; ++run) {
        std::vector<char> out(rank == 1 ? n : 0);
        Require(group->AllToAll(in.data(), out.data(), ddl::Exchange(rank, size, nbytes)));
        if (out != std::vector<char>(out.size(), 7)) Fail("exchange");
        CheckSum<float>(ddl::DType::kFloat32, 1, true, 1);
      }
    }
    if (what == "stop") {
      std::vector<float> values(100'000, 1.0f);
      // Of limits.py: the test's DDL_STALL_TIMEOUT grows with it.
      const char* slowness = std::getenv("TESTS_SLOWNESS");
      if (group->rank() == 1) usleep(1'500'000 * (slowness ? std::atof(slowness) : 1.0));
      const ddl::Status first =
          group->AllReduce(values.data(), values.data(), 100'000, ddl::DType::kFloat32, 1);
      const ddl::Status again = group->Broadcast(values.data(), 4, 0);
      Say(std::to_string(static_cast<int>(first.code())) + " " + first.message());
      Say(again.message() == first.message() ? "broken" : "not broken: " + again.message());
      MPI_Barrier(MPI_COMM_WORLD);
      MPI_Abort(MPI_COMM_WORLD, 0);  // MPI_Finalize would wait for messages that nobody takes
    }
    Say("ok");
  }
  MPI_Finalize();
  return 0;
}
