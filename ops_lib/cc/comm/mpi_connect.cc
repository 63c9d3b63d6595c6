#include "comm/mpi_connect.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/host_memory.h"
#include "comm/hosts_communicator.h"
#include "comm/mpi_communicator.h"
#include "comm/shm_communicator.h"
#include "core/cores.h"
#include "core/log.h"

namespace ddl {
namespace {

// More move no more bytes: a few keep the memory of a processor busy.
constexpr int kMostThreads = 4;

// As many as cores for each of the ranks that are here. The launcher may have bound each to some of
// them, so the ranks tell each other. Collective.
Status CountThreads(const Config& config, MpiCommunicator* mpi, int* threads) {
  const std::vector<char> mine = Affinity();
  const int64_t nbytes = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(mpi->size());
  DDL_RETURN_IF_ERROR(mpi->AllGather(&nbytes, lengths.data(),
                                     std::vector<int64_t>(mpi->size(), sizeof(nbytes))));
  std::vector<char> all(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
  DDL_RETURN_IF_ERROR(mpi->AllGather(mine.data(), all.data(), lengths));
  std::vector<std::vector<char>> here;
  auto begin = all.begin();
  for (int rank = 0; rank < mpi->size(); ++rank) {
    const auto end = begin + lengths[rank];
    if (mpi->hosts()[rank] == mpi->hosts()[mpi->rank()]) here.emplace_back(begin, end);
    begin = end;
  }
  // Hosts of DDL_HOSTID may share the cores of one machine.
  const int ranks_here = std::max(mpi->local_size(), static_cast<int>(here.size()));
  const int cores = static_cast<int>(AvailableCores(here) / ranks_here);
  *threads = config.threads > 0 ? config.threads : std::clamp(cores, 1, kMostThreads);
  return Status();
}

void LogThreads(int rank, const HostMemory& memory, const Status& why) {
  const int threads = memory.channels->size();
  if (!why.ok()) {
    LogLine(rank, "no memory for more than " + std::to_string(threads) +
                      " threads of each rank: " + why.message());
  }
  if (threads > 1) LogLine(rank, "reduces with " + std::to_string(threads) + " threads");
}

}  // namespace

Status Connect(const Config& config, int id, const std::vector<int>& ranks,
               std::unique_ptr<Communicator>* communicator) {
  std::unique_ptr<MpiCommunicator> mpi;
  DDL_RETURN_IF_ERROR(MpiCommunicator::OverWorld(config.host_id, config.stall_timeout_s, id, ranks, &mpi));
  const int rank = mpi->rank(), size = mpi->size();
  // Ranks with different settings must not wait for each other below.
  int32_t votes[] = {config.transport == TransportChoice::kMpi,
                     config.transport == TransportChoice::kShm};
  DDL_RETURN_IF_ERROR(mpi->baseline()->AllReduce(votes, votes, 2, DType::kInt32));
  if (votes[0] % size != 0 || votes[1] % size != 0) {
    return Status(Code::kFailedPrecondition,
                  "DDL_TRANSPORT differs among the ranks. Give all of them the same value.");
  }
  const std::vector<int>& hosts = mpi->hosts();
  std::vector<int> host_sizes(*std::max_element(hosts.begin(), hosts.end()) + 1, 0);
  std::vector<int> ranks_on_host;  // of each rank, its number on its host
  for (const int host : hosts) ranks_on_host.push_back(host_sizes[host]++);
  const auto [fewest, most] = std::minmax_element(host_sizes.begin(), host_sizes.end());
  const bool one_host = host_sizes.size() == 1;
  const bool must = config.transport == TransportChoice::kShm;
  if (must && !one_host) {
    return Status(Code::kFailedPrecondition,
                  "DDL_TRANSPORT is shm, but the ranks are on several hosts. Set it to auto.");
  }

  std::unique_ptr<HostMemory> memory;
  if (config.transport != TransportChoice::kMpi && *most > 1) {
    Status why;
    int threads = 1;
    DDL_RETURN_IF_ERROR(CountThreads(config, mpi.get(), &threads));
    DDL_RETURN_IF_ERROR(
        ShareMemory(mpi.get(), hosts, threads, config.stall_timeout_s, &memory, &why));
    if (must && !memory) {
      return !why.ok() ? why
                       : Status(Code::kFailedPrecondition,
                                "DDL_TRANSPORT is shm, but other ranks cannot share memory; they "
                                "say why.");
    }
    // Each rank that failed says why; the others only that they reduce over MPI.
    if (!memory && !why.ok() && config.log_info) {
      LogLine(rank, "no shared memory, over MPI instead: " + why.message());
    }
    if (memory && config.log_info) LogThreads(rank, *memory, why);
  }
  if (!memory) {
    mpi->MakeBarrier();
    *communicator = std::move(mpi);
  } else if (one_host) {
    *communicator = std::make_unique<ShmCommunicator>(std::move(mpi), std::move(memory));
  } else {
    std::unique_ptr<Transport> cross_host;
    DDL_RETURN_IF_ERROR(mpi->Join(ranks_on_host[rank] < *fewest ? ranks_on_host[rank] : -1,
                                  hosts[rank], &cross_host));
    *communicator = std::make_unique<HostsCommunicator>(std::move(mpi), std::move(memory),
                                                        std::move(cross_host), *fewest, hosts);
  }
  return Status();
}

}  // namespace ddl
