// What an allreduce of float32 through shared memory costs, for cost.py. Started by mpirun.
// argv: sizes in bytes. Rank 0 prints one line for each size:
//   <bytes> <seconds for one call> <processor seconds of all ranks for one call>
// Every rank checks every result.

#include <mpi.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi_connect.h"
#include "require.h"

namespace {

using Clock = std::chrono::steady_clock;

double ProcessorSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return time.tv_sec + time.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  std::unique_ptr<ddl::Communicator> group;
  ddl::Config config;
  config.transport = ddl::TransportChoice::kShm;
  config.stall_timeout_s = 60;
  Require(ddl::Connect(config, 0, {}, &group));
  const int rank = group->rank(), size = group->size();
  for (int argument = 1; argument < argc; ++argument) {
    const int64_t nbytes = std::atoll(argv[argument]), count = nbytes / 4;
    std::vector<float> in(count), out(count);
    for (int64_t i = 0; i < count; ++i) in[i] = static_cast<float>(i % 10007 * size + rank);
    const auto call = [&] {
      Require(group->AllReduce(in.data(), out.data(), count, ddl::DType::kFloat32, 1));
    };
    call();  // warms up
    const int calls = static_cast<int>(std::max<int64_t>((256 << 20) / nbytes, 1));
    MPI_Barrier(MPI_COMM_WORLD);
    const Clock::time_point start = Clock::now();
    const double before = ProcessorSeconds();
    for (int i = 0; i < calls; ++i) call();
    const double mine[] = {std::chrono::duration<double>(Clock::now() - start).count() / calls,
                           (ProcessorSeconds() - before) / calls};
    double slowest = 0, together = 0;
    MPI_Reduce(&mine[0], &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&mine[1], &together, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
      std::printf("%lld %.9f %.9f\n", static_cast<long long>(nbytes), slowest, together);
    }
    const float ranks = static_cast<float>(size * (size - 1) / 2);
    for (int64_t i = 0; i < count; ++i) {
      if (out[i] != static_cast<float>(i % 10007 * size * size) + ranks) Die("a wrong sum");
    }
  }
  group.reset();
  MPI_Finalize();
  return 0;
}
