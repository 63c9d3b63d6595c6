#include "runtime/gather.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "runtime/description.h"

namespace ddl {
namespace {

// Gives every rank the numbers of each rank, of all equally many, rank by rank.
Status ShareNumbers(Communicator* communicator, const std::vector<int64_t>& mine,
                    std::vector<int64_t>* numbers) {
  const int64_t nbytes = static_cast<int64_t>(mine.size() * sizeof(int64_t));
  numbers->resize(mine.size() * communicator->size());
  return communicator->AllGather(mine.data(), numbers->data(),
                                 std::vector<int64_t>(communicator->size(), nbytes));
}

// Of a tensor of these dimensions, which has some.
int64_t RowNbytes(const Request& request, size_t tensor) {
  const std::vector<int64_t>& dims = request.dims(tensor);
  return std::accumulate(dims.begin() + 1, dims.end(),
                         static_cast<int64_t>(DTypeSize(request.dtype)),
                         std::multiplies<int64_t>());
}

// Whether all tensors have a first dimension; the ranks have agreed on that.
Status RequireRows(const Request& request, Code code, const char* what_for) {
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    if (!request.dims(i).empty()) continue;
    return Status(code, Title(request) + ": all ranks sent scalars" +
                            (i == 0 ? "" : " as tensor " + std::to_string(i)) +
                            ", which have no first dimension to " + what_for +
                            " along. Reshape them to [1].");
  }
  return Status();
}

// Lets each rank allocate, and fails on all if one could not. `rows`: of the results of each rank.
Status Allocate(Communicator* communicator, const Request& request,
                const std::vector<int64_t>& sizes, const std::vector<int64_t>& rows,
                std::vector<void*>* outs) {
  outs->assign(request.tensors.size(), nullptr);
  const Status allocated = request.allocate(sizes, outs->data());
  std::vector<int64_t> failures;
  DDL_RETURN_IF_ERROR(ShareNumbers(communicator, {allocated.ok() ? 0 : 1}, &failures));
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank] == 0) continue;
    return Status(Code::kInternal,
                  Title(request) + ": rank " + std::to_string(rank) +
                      " could not allocate the result of " + std::to_string(rows[rank]) +
                      " rows. Gather less, or in parts. " + allocated.message());
  }
  return Status();
}

std::string List(const std::vector<int64_t>& numbers, int64_t first, int64_t count) {
  constexpr int64_t kMost = 16;
  std::string text = "[";
  for (int64_t i = 0; i < std::min(count, kMost); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[first + i]);
  }
  return text + (count > kMost ? ", ...]" : "]");
}

// The numbers of all ranks, where they have not come with the agreement.
Status FindNumbers(Communicator* communicator, const Request& request,
                   const std::vector<int64_t>* known, std::vector<int64_t>* numbers) {
  if (known == nullptr) {
    return ShareNumbers(communicator, NumbersOf(request, communicator->size()), numbers);
  }
  *numbers = *known;
  return Status();
}

}  // namespace

std::vector<int64_t> NumbersOf(const Request& request, int size) {
  std::vector<int64_t> mine;
  if (request.kind != Request::Kind::kAllToAll) {
    for (size_t i = 0; i < request.tensors.size(); ++i) mine.push_back(request.dims(i)[0]);
    return mine;
  }
  // Its rows, how many splits it gave, and those.
  mine = {request.dims(0)[0], static_cast<int64_t>(request.splits.size())};
  mine.insert(mine.end(), request.splits.begin(), request.splits.end());
  mine.resize(2 + size, 0);
  return mine;
}

std::vector<Range> SharesOf(const Request& request, size_t tensor, int size) {
  const int64_t row_nbytes = RowNbytes(request, tensor);
  std::vector<Range> shares;
  for (int rank = 0; rank < size; ++rank) {
    const Range rows = EqualPart(request.dims(tensor)[0], size, rank);
    shares.push_back({rows.begin * row_nbytes, rows.end * row_nbytes});
  }
  return shares;
}

Status Gather(Communicator* communicator, NcclCommunicator* gpus, const Request& request,
              const std::vector<int64_t>* numbers, int64_t* nbytes) {
  const int size = communicator->size();
  const size_t tensors = request.tensors.size();
  DDL_RETURN_IF_ERROR(RequireRows(request, Code::kInvalidArgument, "join"));
  std::vector<int64_t> by_rank;
  DDL_RETURN_IF_ERROR(FindNumbers(communicator, request, numbers, &by_rank));
  std::vector<int64_t> sizes(tensors * size), rows(size, 0);
  for (size_t i = 0; i < tensors; ++i) {
    for (int rank = 0; rank < size; ++rank) {
      sizes[i * size + rank] = by_rank[rank * tensors + i];
      for (int64_t& one : rows) one += sizes[i * size + rank];
    }
  }
  std::vector<void*> outs;
  DDL_RETURN_IF_ERROR(Allocate(communicator, request, sizes, rows, &outs));

  *nbytes = 0;
  std::vector<SharedTensor> shared;
  for (size_t i = 0; i < tensors; ++i) {
    std::vector<int64_t> shares(sizes.begin() + static_cast<int64_t>(i) * size,
                                sizes.begin() + static_cast<int64_t>(i + 1) * size);
    for (int64_t& one : shares) one *= RowNbytes(request, i);
    *nbytes = std::accumulate(shares.begin(), shares.end(), *nbytes);
    if (request.gpu != nullptr) {
      DDL_RETURN_IF_ERROR(gpus->AllGather(*request.gpu, request.tensors[i].in, outs[i], shares));
    }
    shared.push_back({request.tensors[i].in, outs[i], ConsecutiveRanges(shares)});
  }
  return request.gpu == nullptr ? communicator->AllGatherN(shared) : Status();
}

Status AllToAll(Communicator* communicator, const Request& request,
                const std::vector<int64_t>* numbers, int64_t* nbytes) {
  const int size = communicator->size(), rank = communicator->rank();
  DDL_RETURN_IF_ERROR(RequireRows(request, Code::kInvalidInput, "split"));
  std::vector<int64_t> all;
  DDL_RETURN_IF_ERROR(FindNumbers(communicator, request, numbers, &all));
  const int64_t width = static_cast<int64_t>(all.size()) / size;
  std::vector<int64_t> rows(static_cast<size_t>(size) * size);  // from rank to rank
  for (int from = 0; from < size; ++from) {
    const int64_t at = from * width, given = all[at + 1];
    const std::string who = Title(request) + ": rank " + std::to_string(from);
    const std::string its_rows = std::to_string(all[at]) + " rows";
    if (given == 0) {
      if (all[at] % size != 0) {
        return Status(Code::kInvalidInput,
                      who + " sent " + its_rows + ", which are no multiple of " +
                          std::to_string(size) + " ranks. Give splits, or other rows.");
      }
      std::fill_n(rows.begin() + from * size, size, all[at] / size);
      continue;
    }
    if (given != size) {
      return Status(Code::kInvalidInput, who + " gave " + std::to_string(given) + " splits for " +
                                             std::to_string(size) +
                                             " ranks. Give one for each rank.");
    }
    const auto first = all.begin() + at + 2;
    const std::string splits = List(all, at + 2, size);
    const int64_t most = all[at];
    // Else their sum could wrap around to it.
    if (std::any_of(first, first + size, [most](int64_t one) { return one < 0 || one > most; })) {
      return Status(Code::kInvalidInput, who + " gave splits " + splits + " of " + its_rows +
                                             ". None may be negative or more than its rows.");
    }
    if (std::accumulate(first, first + size, int64_t{0}) != all[at]) {
      return Status(Code::kInvalidInput, who + " gave splits " + splits + " of " + its_rows +
                                             ". They must add up to its first dimension.");
    }
    std::copy_n(first, size, rows.begin() + from * size);
  }
  std::vector<int64_t> received, totals(size, 0);
  for (int from = 0; from < size; ++from) {
    received.push_back(rows[from * size + rank]);
    for (int to = 0; to < size; ++to) totals[to] += rows[from * size + to];
  }
  std::vector<void*> outs;
  DDL_RETURN_IF_ERROR(Allocate(communicator, request, received, totals, &outs));
  const int64_t row_nbytes = RowNbytes(request, 0);
  *nbytes = totals[rank] * row_nbytes;
  for (int64_t& one : rows) one *= row_nbytes;
  return communicator->AllToAll(request.tensors[0].in, outs[0],
                                Exchange(rank, size, std::move(rows)));
}

Status ReduceScatter(Communicator* communicator, const Request& request, Reduction reduction) {
  DDL_RETURN_IF_ERROR(RequireRows(request, Code::kInvalidInput, "scatter"));
  std::vector<SharedTensor> shared;
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    shared.push_back({request.tensors[i].in, request.tensors[i].out,
                      SharesOf(request, i, communicator->size())});
  }
  return communicator->ReduceScatterN(shared, request.dtype, reduction);
}

}  // namespace ddl
