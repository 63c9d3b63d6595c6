#include "comm/host_memory.h"

#include <algorithm>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

namespace ddl {
namespace {

// Of a host that its first rank tells all others: how many groups there are, and their Address.
constexpr int64_t kNumbers = 5;

// A sum to which only one rank adds something: it waits without a limit for those that start late.
Status Tell(Communicator* base, std::vector<int64_t>* numbers) {
  return base->baseline()->AllReduce(numbers->data(), numbers->data(),
                                     static_cast<int64_t>(numbers->size()), DType::kInt64);
}

// Where the group of a lane lies.
void* PlaceOf(const HostMemory& memory, int size, int lane) {
  return static_cast<char*>(memory.segment.base()) + HostGroup::Nbytes(size) * lane;
}

// Memory for `lanes` groups of `size` ranks, or for half as many if there is too little, and so on.
// Returns for how many there is; `why`: what went wrong before.
int MakeGroups(int size, int lanes, std::unique_ptr<HostMemory>* memory,
               SharedSegment::Address* address, Status* why) {
  for (; lanes > 0; lanes /= 2) {
    *memory = std::make_unique<HostMemory>();
    const Status made = (*memory)->segment.Create(HostGroup::Nbytes(size) * lanes, address);
    if (made.ok()) break;
    *why = made;
  }
  for (int lane = 0; lane < lanes; ++lane) {
    HostGroup::Format(PlaceOf(**memory, size, lane), size);
  }
  return lanes;
}

Status JoinGroups(HostMemory* memory, int place, int lanes, double timeout_s,
                  const std::vector<int>& here) {
  const int size = static_cast<int>(here.size());
  memory->group = std::make_unique<HostGroup>(memory->segment.base(), place, size, timeout_s, here);
  std::vector<void*> others;
  for (int lane = 1; lane < lanes; ++lane) others.push_back(PlaceOf(*memory, size, lane));
  try {
    memory->lanes = std::make_unique<HostLanes>(memory->group.get(), others, here);
  } catch (const std::system_error& error) {
    return Status(Code::kInternal,
                  "cannot start " + std::to_string(lanes - 1) + " threads: " + error.what() +
                      ". Raise the limit of processes (ulimit -u), or set DDL_THREADS=1.");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, "cannot start " + std::to_string(lanes - 1) +
                                       " threads: " + error.what() + ". Set DDL_THREADS=1.");
  }
  return Status();
}

}  // namespace

Status ShareMemory(Communicator* base, const std::vector<int>& hosts, int threads, double timeout_s,
                   std::unique_ptr<HostMemory>* memory, Status* why) {
  const int rank = base->rank();
  std::vector<int> here;  // the ranks of this host
  for (int one = 0; one < base->size(); ++one) {
    if (hosts[one] == hosts[rank]) here.push_back(one);
  }
  const int size = static_cast<int>(here.size());
  const int place = static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());

  // In each step all ranks take part, whatever has failed before.
  std::vector<int64_t> wishes(base->size(), 0);
  wishes[rank] = threads;
  DDL_RETURN_IF_ERROR(Tell(base, &wishes));
  int64_t lanes = threads;
  for (const int one : here) lanes = std::min(lanes, wishes[one]);

  auto made = std::make_unique<HostMemory>();
  SharedSegment::Address address;
  if (place == 0) lanes = MakeGroups(size, static_cast<int>(lanes), &made, &address, why);
  std::vector<int64_t> numbers(base->size() * kNumbers, 0);
  int64_t* mine = &numbers[rank * kNumbers];
  mine[0] = lanes;
  mine[1] = address.pid;
  mine[2] = address.file;
  mine[3] = address.nbytes;
  mine[4] = static_cast<int64_t>(address.cookie);
  DDL_RETURN_IF_ERROR(Tell(base, &numbers));
  const int64_t* first = &numbers[here[0] * kNumbers];
  lanes = first[0];
  address = {first[1], first[2], first[3], static_cast<uint64_t>(first[4])};
  Status joined;
  if (lanes > 0 && place != 0) joined = made->segment.Attach(address);
  if (lanes > 0 && joined.ok()) {
    joined = JoinGroups(made.get(), place, static_cast<int>(lanes), timeout_s, here);
  }
  if (!joined.ok()) *why = joined;
  int32_t failures = lanes > 0 && joined.ok() ? 0 : 1;
  DDL_RETURN_IF_ERROR(base->baseline()->AllReduce(&failures, &failures, 1, DType::kInt32));
  if (failures > 0) return Status();
  made->segment.Seal();
  *memory = std::move(made);
  return Status();
}

}  // namespace ddl
