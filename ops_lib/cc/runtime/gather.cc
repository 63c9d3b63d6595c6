#include "runtime/gather.h"

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace ddl {
namespace {

// Gives every rank the number of each rank.
Status Exchange(Communicator* communicator, int64_t mine, std::vector<int64_t>* numbers) {
  numbers->assign(communicator->size(), 0);
  (*numbers)[communicator->rank()] = mine;
  return communicator->AllReduce(numbers->data(), numbers->data(), communicator->size(),
                                 DType::kInt64, 1);
}

}  // namespace

Status Gather(Communicator* communicator, NcclCommunicator* gpus, const Request& request,
              int64_t* nbytes) {
  const TensorBuffer& tensor = request.tensors[0];
  const std::vector<int64_t>& dims = request.dims(0);
  const std::string title = request.op_name + " \"" + request.name + "\": ";
  if (dims.empty()) {
    return Status(Code::kInvalidArgument,
                  title + "all ranks sent scalars, which have no first dimension to join along. "
                          "Reshape them to [1].");
  }
  std::vector<int64_t> sizes;
  DDL_RETURN_IF_ERROR(Exchange(communicator, dims[0], &sizes));

  void* out = nullptr;
  const Status allocated = request.allocate(sizes, &out);
  std::vector<int64_t> failures;
  DDL_RETURN_IF_ERROR(Exchange(communicator, allocated.ok() ? 0 : 1, &failures));
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank] == 0) continue;
    const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    return Status(Code::kInternal, title + "rank " + std::to_string(rank) +
                                       " could not allocate the result of " + std::to_string(rows) +
                                       " rows. Gather less, or in parts. " + allocated.message());
  }

  const int64_t row_nbytes =
      std::accumulate(dims.begin() + 1, dims.end(),
                      static_cast<int64_t>(DTypeSize(request.dtype)), std::multiplies<int64_t>());
  for (int64_t& size : sizes) size *= row_nbytes;
  *nbytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  return request.gpu == nullptr ? communicator->AllGather(tensor.in, out, sizes)
                                : gpus->AllGather(*request.gpu, tensor.in, out, sizes);
}

}  // namespace ddl
