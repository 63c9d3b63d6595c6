#include "algorithms/tree_broadcast.h"

#include <algorithm>
#include <vector>

namespace ddl {
namespace {

constexpr int64_t kSegmentBytes = int64_t{256} << 10;
// Segments to be received at once, and to be sent to each child.
constexpr int64_t kPipelineDepth = 4;

}  // namespace

Status TreeBroadcast(Transport* transport, void* buffer, int64_t nbytes, int root) {
  const int size = transport->size();
  const int rank = (transport->rank() - root + size) % size;  // counted from the root on
  const auto peer = [&](int counted) { return (counted + root) % size; };
  int parent = rank - 1;
  std::vector<int> children;
  if (nbytes > size * kSegmentBytes) {
    if (rank + 1 < size) children.push_back(rank + 1);
  } else {
    parent = rank & (rank - 1);
    int bit = 1;
    while (bit < size && !(rank & bit)) bit *= 2;
    // The farthest first: it has the most to pass on to.
    for (bit /= 2; bit >= 1; bit /= 2) {
      if (rank + bit < size) children.push_back(rank + bit);
    }
  }
  char* bytes = static_cast<char*>(buffer);
  const auto nbytes_from = [&](int64_t first) { return std::min(kSegmentBytes, nbytes - first); };
  int64_t begun = 0;
  for (int64_t first = 0; first < nbytes; first += kSegmentBytes) {
    if (rank > 0) {
      for (; begun < std::min(nbytes, first + kPipelineDepth * kSegmentBytes);
           begun += kSegmentBytes) {
        DDL_RETURN_IF_ERROR(transport->Receive(peer(parent), bytes + begun, nbytes_from(begun)));
      }
      DDL_RETURN_IF_ERROR(transport->AwaitReceive());
    }
    for (const int child : children) {
      DDL_RETURN_IF_ERROR(transport->Send(peer(child), bytes + first, nbytes_from(first)));
    }
    DDL_RETURN_IF_ERROR(
        transport->AwaitSends(kPipelineDepth * static_cast<int64_t>(children.size())));
  }
  return transport->AwaitSends(0);
}

}  // namespace ddl
