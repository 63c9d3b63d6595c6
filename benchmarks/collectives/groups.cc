// Measures the allreduce of a group of float32 tensors, as AllReduceN does it, below TensorFlow:
// ours through shared memory, ours of one tensor of as many bytes, and an MPI_Allreduce for each
// tensor, in turn. Started by mpirun.
// argv: rounds, then for each group its elements by tensor, joined by commas. Rank 0 prints
//   <way> <bytes> <seconds for one call>
// Every rank checks every result.

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "comm/mpi_connect.h"
#include "require.h"
#include "runtime/fused_allreduce.h"

namespace {

using Clock = std::chrono::steady_clock;

float ValueOf(int64_t index, int rank, int size) {
  return static_cast<float>(index % 10007 * size + rank);
}

// Memory of its own for each tensor, beginning at a cache line, as TensorFlow's do.
class Group {
 public:
  Group(const std::vector<int64_t>& counts, int rank, int size) : size_(size) {
    request.op_name = "AllReduceN";
    for (const int64_t count : counts) {
      ddl::TensorBuffer tensor;
      float* const in = Allocate(count);
      for (int64_t i = 0; i < count; ++i) in[i] = ValueOf(i, rank, size);
      tensor.in = in;
      tensor.out = Allocate(count);
      tensor.count = count;
      request.tensors.push_back(tensor);
      nbytes += count * 4;
    }
  }

  void Clear() {
    for (const ddl::TensorBuffer& tensor : request.tensors) {
      std::fill_n(static_cast<float*>(tensor.out), tensor.count, -1.0f);
    }
  }

  void Check(const char* way) const {
    const float ranks = static_cast<float>(size_ * (size_ - 1) / 2);
    for (const ddl::TensorBuffer& tensor : request.tensors) {
      for (int64_t i = 0; i < tensor.count; ++i) {
        const float got = static_cast<const float*>(tensor.out)[i];
        if (got == static_cast<float>(i % 10007 * size_ * size_) + ranks) continue;
        Die(std::string(way) + ": [" + std::to_string(i) + "] is " + std::to_string(got));
      }
    }
  }

  ddl::Request request;
  int64_t nbytes = 0;

 private:
  float* Allocate(int64_t count) {
    memory_.emplace_back(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64), std::free);
    return static_cast<float*>(memory_.back().get());
  }

  const int size_;
  std::deque<std::unique_ptr<void, void (*)(void*)>> memory_;
};

std::vector<int64_t> Counts(const char* words) {
  std::vector<int64_t> counts;
  std::istringstream all(words);
  for (std::string word; std::getline(all, word, ',');) counts.push_back(std::atoll(word.c_str()));
  return counts;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  {
    std::unique_ptr<ddl::Communicator> shared;
    ddl::Config config;
    config.transport = ddl::TransportChoice::kShm;
    Require(ddl::Connect(config, 0, {}, &shared));
    const int rank = shared->rank(), size = shared->size();
    ddl::FusedAllReduce fused(shared.get());
    const int rounds = std::atoi(argv[1]);
    for (int argument = 2; argument < argc; ++argument) {
      Group group(Counts(argv[argument]), rank, size);
      Group single({group.nbytes / 4}, rank, size);
      for (int round = 0; round < rounds; ++round) {
        for (const char* way : {"group", "single", "MPI_Allreduce"}) {
          Group& tensors = way[0] == 's' ? single : group;
          const auto call = [&] {
            if (way[0] != 'M') return Require(fused.Run(tensors.request));
            for (const ddl::TensorBuffer& tensor : tensors.request.tensors) {
              MPI_Allreduce(tensor.in, tensor.out, static_cast<int>(tensor.count), MPI_FLOAT,
                            MPI_SUM, MPI_COMM_WORLD);
            }
          };
          tensors.Clear();
          call();  // warms up
          const int calls =
              static_cast<int>(std::clamp<int64_t>((256 << 20) / tensors.nbytes, 1, 100));
          MPI_Barrier(MPI_COMM_WORLD);
          const Clock::time_point start = Clock::now();
          for (int run = 0; run < calls; ++run) call();
          double seconds = std::chrono::duration<double>(Clock::now() - start).count() / calls;
          double slowest = 0;
          MPI_Reduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
          tensors.Check(way);
          if (rank == 0) {
            std::printf("%s %lld %.9f\n", way, static_cast<long long>(group.nbytes), slowest);
            std::fflush(stdout);
          }
        }
      }
    }
  }
  MPI_Finalize();
  return 0;
}
