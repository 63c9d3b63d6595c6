// Measures allreduce of float32 on the ranks of one job, without TensorFlow: ours over shared
// memory, ours over MPI, and MPI_Allreduce as it is, in turn; and for large tensors the copy of the
// same buffers that bounds them. Started by mpirun.
// argv: rounds, then sizes in bytes. Rank 0 prints one line for each sample:
//   <what> <bytes> <seconds for one call>
// and lines that begin with # for what the machine can do. Every rank checks every result.

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi_connect.h"
#include "core/vector.h"
#include "ours.h"
#include "require.h"
#include "values.h"

namespace {

using Clock = std::chrono::steady_clock;

// From here on nothing of a tensor is left in the caches from the call before.
constexpr int64_t kLargeBytes = int64_t{64} << 20;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

void Plain(const float* in, float* out, int64_t count) {
  MPI_Allreduce(in, out, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

// What one thread does alone, and what it does while all ranks do the same.
void Bandwidth(int rank, const char* when) {
  constexpr int64_t kCount = int64_t{16} << 20;
  Buffer a(kCount), b(kCount), c(kCount);
  for (Buffer* buffer : {&a, &b, &c}) std::fill(buffer->get(), buffer->get() + kCount, 1.0f);
  const void* sources[] = {a.get(), b.get()};
  ddl::Sum sum;
  sum.sources = sources;
  sum.num_sources = 2;
  sum.out = c.get();
  sum.count = kCount;
  for (const char* what : {"memcpy", "stream-copy", "add"}) {
    std::vector<double> seconds;
    for (int run = 0; run < 7; ++run) {
      const Clock::time_point start = Clock::now();
      if (*what == 'm') std::memcpy(c.get(), a.get(), kCount * 4);
      if (*what == 's') ddl::CopyBytes(c.get(), a.get(), kCount * 4, true);
      if (*what == 'a') ddl::Compute(sum);
      seconds.push_back(Seconds(start));
    }
    std::sort(seconds.begin(), seconds.end());
    if (rank == 0) std::printf("# %s %s %.0f\n", what, when, kCount * 4 / seconds[3]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  std::unique_ptr<ddl::Communicator> plain, shared;
  ddl::Config config;
  config.transport = ddl::TransportChoice::kMpi;
  Require(ddl::Connect(config, 0, {}, &plain));
  config.transport = ddl::TransportChoice::kShm;
  Require(ddl::Connect(config, 0, {}, &shared));
  const int rank = plain->rank(), size = plain->size();
  const int rounds = std::atoi(argv[1]);
  if (rank == 0) std::printf("# vectors %s 0\n", ddl::VectorInstructions());
  if (rank == 0) Bandwidth(0, "alone");
  MPI_Barrier(MPI_COMM_WORLD);
  Bandwidth(rank, "together");

  int64_t largest = 0;
  for (int i = 2; i < argc; ++i) largest = std::max<int64_t>(largest, std::atoll(argv[i]));
  Buffer input(largest / 4), output(largest / 4);
  float* const in = input.get();
  float* const out = output.get();
  for (int64_t i = 0; i < largest / 4; ++i) in[i] = ValueOf(i, rank, size);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 2; i < argc; ++i) {
      const int64_t nbytes = std::atoll(argv[i]), count = nbytes / 4;
      // Some milliseconds for each sample, so that a small call is told from the clock.
      const int calls = static_cast<int>(std::clamp<int64_t>((32 << 20) / nbytes, 1, 20000));
      for (const char* what : {"shm", "stream-copy", "mpi", "MPI_Allreduce"}) {
        const bool copy = std::strcmp(what, "stream-copy") == 0;
        if (copy && nbytes < kLargeBytes) continue;
        const auto call = [&] {
          if (copy) {
            ddl::CopyBytes(out, in, nbytes, true);
            return ddl::FenceNonTemporalStores();
          }
          if (what[0] == 's') Ours(*shared, in, out, count);
          if (what[0] == 'm') Ours(*plain, in, out, count);
          if (what[0] == 'M') Plain(in, out, count);
        };
        const auto check = [&] {
          if (!copy) return Check(out, count, size, what);
          if (std::memcmp(out, in, nbytes) != 0) Die("stream-copy: other bytes");
        };
        std::fill(out, out + count, -1.0f);
        call();  // warms up, and is checked
        check();
        MPI_Barrier(MPI_COMM_WORLD);
        const Clock::time_point start = Clock::now();
        for (int run = 0; run < calls; ++run) call();
        double seconds = Seconds(start) / calls, slowest = 0;
        MPI_Reduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
          std::printf("%s %lld %.9f\n", what, static_cast<long long>(nbytes), slowest);
          std::fflush(stdout);
        }
        check();
      }
    }
  }
  shared.reset();
  plain.reset();
  MPI_Finalize();
  return 0;
}
