// Allreduce of float32 by one MPI library, for mpi_rank.py; with DDL_OURS by our engine as well,
// through shared memory. Every rank checks every element before and after a sample, and ends the
// job if one is wrong.

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "require.h"
#include "values.h"
#ifdef DDL_OURS
#include <memory>

#include "comm/mpi_connect.h"
#include "ours.h"
#endif

namespace {

using Clock = std::chrono::steady_clock;

int rank = 0, size = 0;
#ifdef DDL_OURS
std::unique_ptr<ddl::Communicator> shared;
#endif

void Reduce(bool ours, const float* in, float* out, int64_t count) {
#ifdef DDL_OURS
  if (ours) return Ours(*shared, in, out, count);
#else
  if (ours) Die("this library was built without our engine");
#endif
  MPI_Allreduce(in, out, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

}  // namespace

extern "C" {

// Collective. Writes what the library says of itself, at most `room` bytes. Returns the rank.
int BenchStart(char* version, int room) {
  int provided = 0, length = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::vector<char> text(MPI_MAX_LIBRARY_VERSION_STRING);
  MPI_Get_library_version(text.data(), &length);
  std::strncpy(version, text.data(), room - 1);
#ifdef DDL_OURS
  ddl::Config config;
  config.transport = ddl::TransportChoice::kShm;
  Require(ddl::Connect(config, 0, {}, &shared));
#endif
  return rank;
}

// Collective. Seconds of one of `calls` calls of `nbytes`, each with the next of `buffers` pairs of
// input and output, which all have been used before.
double BenchMeasure(int ours, int64_t nbytes, int calls, int buffers) {
  const int64_t count = nbytes / 4;
  std::vector<Buffer> inputs, outputs;
  for (int i = 0; i < buffers; ++i) {
    for (std::vector<Buffer>* made : {&inputs, &outputs}) made->emplace_back(count);
    for (int64_t j = 0; j < count; ++j) inputs[i].get()[j] = ValueOf(j, rank, size);
    std::fill(outputs[i].get(), outputs[i].get() + count, -1.0f);
    Reduce(ours != 0, inputs[i].get(), outputs[i].get(), count);
    Check(outputs[i].get(), count, size, "before the sample");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const Clock::time_point start = Clock::now();
  for (int call = 0, i = 0; call < calls; ++call) {
    Reduce(ours != 0, inputs[i].get(), outputs[i].get(), count);
    if (++i == buffers) i = 0;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count() / calls;
  for (Buffer& output : outputs) Check(output.get(), count, size, "after the sample");
  return seconds;
}

// Collective.
void BenchEnd() {
#ifdef DDL_OURS
  shared.reset();
#endif
  MPI_Finalize();
}

}  // extern "C"
