#include "comm/host_memory.h"

#include <algorithm>
#include <string>
#include <utility>

namespace ddl {

Status ShareMemory(Communicator* base, const std::vector<int>& hosts, double timeout_s,
                   std::unique_ptr<HostMemory>* memory, Status* why) {
  std::vector<int> here;  // the ranks of this host
  for (int rank = 0; rank < base->size(); ++rank) {
    if (hosts[rank] == hosts[base->rank()]) here.push_back(rank);
  }
  const int size = static_cast<int>(here.size());
  const int place =
      static_cast<int>(std::find(here.begin(), here.end(), base->rank()) - here.begin());

  // In each step all ranks take part, whatever has failed before.
  auto made = std::make_unique<HostMemory>();
  SharedSegment::Address address;
  if (place == 0) {
    *why = made->segment.Create(HostGroup::Nbytes(size), &address);
    if (why->ok()) HostGroup::Format(made->segment.base(), size);
  }
  // A sum to which only one rank adds something: it waits without a limit for those that start late.
  std::vector<int64_t> numbers(base->size() * 4, 0);
  int64_t* mine = &numbers[base->rank() * 4];
  mine[0] = address.pid;
  mine[1] = address.file;
  mine[2] = address.nbytes;
  mine[3] = static_cast<int64_t>(address.cookie);
  DDL_RETURN_IF_ERROR(base->baseline()->AllReduce(numbers.data(), numbers.data(),
                                                  static_cast<int64_t>(numbers.size()),
                                                  DType::kInt64));
  const int64_t* first = &numbers[here[0] * 4];
  address = {first[0], first[1], first[2], static_cast<uint64_t>(first[3])};
  if (place != 0) *why = made->segment.Attach(address);
  if (why->ok()) {
    made->group = std::make_unique<HostGroup>(made->segment.base(), place, size, timeout_s, here);
  }
  int32_t failures = why->ok() ? 0 : 1;
  DDL_RETURN_IF_ERROR(base->baseline()->AllReduce(&failures, &failures, 1, DType::kInt32));
  if (failures > 0) return Status();
  made->segment.Seal();
  *memory = std::move(made);
  return Status();
}

}  // namespace ddl
