// Measures allreduce of float32 between hosts, below the engine. Started by mpirun.
// argv: rounds, then sizes in bytes, and the ways if not all. In each round all ways take turns at
// each size. Rank 0 prints
//   <way> <bytes> <seconds for one call> <bytes that left the busiest host in one call>
// "ours" is what the library does; with several ranks on a host, "flat" is what it does with
// DDL_TRANSPORT=mpi; with one on each, the single algorithms follow. MPI_Allreduce is the last. Every
// rank checks every result.

#include <mpi.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/direct_allreduce.h"
#include "algorithms/halving_doubling.h"
#include "algorithms/ring.h"
#include "comm/mpi_communicator.h"
#include "comm/mpi_connect.h"
#include "require.h"

namespace {

using Clock = std::chrono::steady_clock;
using Way = std::function<ddl::Status(const float*, float*, int64_t)>;

// All that has left this host by its card, headers included. /sys shows the cards of the machine
// that the hosts are on, this one the host's own. Source: proc(5), /proc/net/dev: the ninth number.
double SentBytes() {
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find("eth0:");
    if (colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 5));
    double number = 0;
    for (int i = 0; i < 9; ++i) words >> number;
    return number;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // as the engine's thread
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  {
    std::unique_ptr<ddl::Communicator> ours, flat;
    std::unique_ptr<ddl::MpiCommunicator> base;
    std::unique_ptr<ddl::Transport> all;
    ddl::Config config;
    Require(ddl::Connect(config, 0, {}, &ours));
    config.transport = ddl::TransportChoice::kMpi;
    Require(ddl::Connect(config, 0, {}, &flat));
    Require(ddl::MpiCommunicator::OverWorld("", config.stall_timeout_s, 0, {}, &base));
    const int rank = base->rank(), size = base->size();
    Require(base->Join(0, rank, &all));
    const auto over = [&](auto algorithm) {
      return [&, algorithm](const float* in, float* out, int64_t count) {
        return algorithm(all.get(), in, out, count, ddl::DType::kFloat32, 1);
      };
    };
    const auto by = [](ddl::Communicator* group) {
      return [group](const float* in, float* out, int64_t count) {
        return group->AllReduce(in, out, count, ddl::DType::kFloat32, 1);
      };
    };
    std::vector<std::pair<const char*, Way>> ways = {{"ours", by(ours.get())},
                                                     {"flat", by(flat.get())}};
    if (base->local_size() == 1) {
      ways = {{"ours", by(ours.get())},
              {"doubling", over(ddl::DoublingAllReduce)},
              {"halving", over(ddl::HalvingDoublingAllReduce)},
              {"ring", over(ddl::RingAllReduce)},
              {"direct", over(ddl::DirectAllReduce)}};
    }
    ways.emplace_back("MPI_Allreduce", [&](const float* in, float* out, int64_t count) {
      return base->baseline()->AllReduce(in, out, count, ddl::DType::kFloat32);
    });

    const int rounds = std::atoi(argv[1]);
    std::vector<int64_t> sizes;
    std::set<std::string> wanted;
    for (int i = 2; i < argc; ++i) {
      if (std::isdigit(argv[i][0])) {
        sizes.push_back(std::atoll(argv[i]));
      } else {
        wanted.insert(argv[i]);
      }
    }
    for (int round = 0; round < rounds; ++round) {
      for (const int64_t nbytes : sizes) {
        const int64_t count = nbytes / 4;
        const int calls = static_cast<int>(std::clamp<int64_t>((4 << 20) / nbytes, 1, 100));
        std::vector<float> in(count), out(count);
        for (int64_t k = 0; k < count; ++k) in[k] = static_cast<float>(k % 1009 * size + rank);
        for (const auto& [name, call] : ways) {
          if (!wanted.empty() && wanted.count(name) == 0) continue;
          std::fill(out.begin(), out.end(), -1.0f);
          Require(call(in.data(), out.data(), count));  // warms up
          MPI_Barrier(MPI_COMM_WORLD);
          const double sent = SentBytes();
          MPI_Barrier(MPI_COMM_WORLD);
          const Clock::time_point start = Clock::now();
          for (int run = 0; run < calls; ++run) Require(call(in.data(), out.data(), count));
          const std::chrono::duration<double> took = Clock::now() - start;
          MPI_Barrier(MPI_COMM_WORLD);
          const double of_rank[] = {took.count() / calls, (SentBytes() - sent) / calls};
          double most[2] = {};
          MPI_Reduce(of_rank, most, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
          const float ranks = static_cast<float>(size * (size - 1) / 2);
          for (int64_t k = 0; k < count; ++k) {
            if (out[k] == static_cast<float>(k % 1009 * size * size) + ranks) continue;
            Die(std::string(name) + ": [" + std::to_string(k) + "] is " + std::to_string(out[k]));
          }
          if (rank == 0) {
            std::printf("%s %lld %.9f %.0f\n", name, static_cast<long long>(nbytes), most[0],
                        most[1]);
            std::fflush(stdout);
          }
        }
      }
    }
  }
  MPI_Finalize();
  return 0;
}
