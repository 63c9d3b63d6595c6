#include "comm/host_memory.h"

#include <algorithm>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

namespace ddl {
namespace {

// What the first rank of a host tells all others: how many groups there are, and their Address.
constexpr int64_t kNumbers = 5;

// A sum to which each rank adds its own numbers alone. It waits without a limit for ranks that
// start late.
Status ExchangeNumbers(Communicator* base, std::vector<int64_t>* numbers) {
  return base->baseline()->AllReduce(numbers->data(), numbers->data(),
                                     static_cast<int64_t>(numbers->size()), DType::kInt64);
}

// Where the group of a channel lies in memory.
void* GroupMemory(const HostMemory& memory, int size, int channel) {
  return static_cast<char*>(memory.segment.base()) + HostGroup::Nbytes(size) * channel;
}

// Memory for `channels` groups of `size` ranks, or for half as many if there is too little, and so
// on. Returns for how many there is; `why`: what went wrong before.
int MakeGroups(int size, int channels, std::unique_ptr<HostMemory>* memory,
               SharedSegment::Address* address, Status* why) {
  for (; channels > 0; channels /= 2) {
    *memory = std::make_unique<HostMemory>();
    const Status made = (*memory)->segment.Create(HostGroup::Nbytes(size) * channels, address);
    if (made.ok()) break;
    *why = made;
  }
  for (int channel = 0; channel < channels; ++channel) {
    HostGroup::Format(GroupMemory(**memory, size, channel), size);
  }
  return channels;
}

Status JoinGroups(HostMemory* memory, int rank_on_host, int channels, double timeout_s,
                  const std::vector<int>& here) {
  const int size = static_cast<int>(here.size());
  memory->group =
      std::make_unique<HostGroup>(memory->segment.base(), rank_on_host, size, timeout_s, here);
  std::vector<void*> others;
  for (int channel = 1; channel < channels; ++channel) {
    others.push_back(GroupMemory(*memory, size, channel));
  }
  try {
    memory->channels = std::make_unique<HostChannels>(memory->group.get(), others, here);
  } catch (const std::system_error& error) {
    return Status(Code::kInternal,
                  "cannot start " + std::to_string(channels - 1) + " threads: " + error.what() +
                      ". Raise the limit of processes (ulimit -u), or set DDL_THREADS=1.");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, "cannot start " + std::to_string(channels - 1) +
                                       " threads: " + error.what() + ". Set DDL_THREADS=1.");
  }
  return Status();
}

}  // namespace

Status AllToAllThrough(HostChannels* channels, const void* in, void* out, const Exchange& exchange,
                       const std::vector<int>& here) {
  const int64_t largest = exchange.Largest(here);
  const int64_t nbytes = largest * static_cast<int64_t>(here.size());
  return channels->Run(nbytes, [&](HostGroup* group, int channel, int channels) {
    return AllToAllInPieces(
        group, in, out, SplitEachAtCacheLines(exchange.SentTo(here), channels, channel),
        SplitEachAtCacheLines(exchange.ReceivedFrom(here), channels, channel),
        SplitAtCacheLines({0, largest}, channels)[0].count());
  });
}

Status ShareMemory(Communicator* base, const std::vector<int>& hosts, int threads, double timeout_s,
                   std::unique_ptr<HostMemory>* memory, Status* why) {
  const int rank = base->rank();
  std::vector<int> here;  // the ranks of this host
  for (int one = 0; one < base->size(); ++one) {
    if (hosts[one] == hosts[rank]) here.push_back(one);
  }
  const int size = static_cast<int>(here.size());
  const int rank_on_host =
      static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());

  // In each step all ranks take part, whatever has failed before.
  std::vector<int64_t> requested(base->size(), 0);
  requested[rank] = threads;
  DDL_RETURN_IF_ERROR(ExchangeNumbers(base, &requested));
  int64_t channels = threads;
  for (const int one : here) channels = std::min(channels, requested[one]);

  auto made = std::make_unique<HostMemory>();
  SharedSegment::Address address;
  if (rank_on_host == 0) {
    channels = MakeGroups(size, static_cast<int>(channels), &made, &address, why);
  }
  std::vector<int64_t> numbers(base->size() * kNumbers, 0);
  int64_t* mine = &numbers[rank * kNumbers];
  mine[0] = channels;
  mine[1] = address.pid;
  mine[2] = address.file;
  mine[3] = address.nbytes;
  mine[4] = static_cast<int64_t>(address.cookie);
  DDL_RETURN_IF_ERROR(ExchangeNumbers(base, &numbers));
  const int64_t* first = &numbers[here[0] * kNumbers];
  channels = first[0];
  address = {first[1], first[2], first[3], static_cast<uint64_t>(first[4])};
  Status joined;
  if (channels > 0 && rank_on_host != 0) joined = made->segment.Attach(address);
  if (channels > 0 && joined.ok()) {
    joined = JoinGroups(made.get(), rank_on_host, static_cast<int>(channels), timeout_s, here);
  }
  if (!joined.ok()) *why = joined;
  int32_t failures = channels > 0 && joined.ok() ? 0 : 1;
  DDL_RETURN_IF_ERROR(base->baseline()->AllReduce(&failures, &failures, 1, DType::kInt32));
  if (failures > 0) return Status();
  made->segment.Seal();
  *memory = std::move(made);
  return Status();
}

}  // namespace ddl
