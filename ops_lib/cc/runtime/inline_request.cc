#include "runtime/inline_request.h"

#include <algorithm>
#include <cstring>

#include "runtime/gather.h"

namespace ddl {
namespace {

constexpr int64_t kWord = sizeof(int64_t);

int64_t Nbytes(const Request& request) {
  int64_t count = 0;
  for (const TensorBuffer& one : request.tensors) count += one.count;
  return count * static_cast<int64_t>(DTypeSize(request.dtype));
}

// Calls function(tensor, its number, its bytes, where they are in the row of all).
template <typename Function>
void ForEach(const Request& request, Function function) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  int64_t at = 0;
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    const int64_t nbytes = request.tensors[i].count * element;
    if (nbytes > 0) function(request.tensors[i], i, nbytes, at);
    at += nbytes;
  }
}

// Scalars have no rows: the error is that of the whole way.
bool HasRows(const Request& request) {
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    if (request.dims(i).empty()) return false;
  }
  return true;
}

}  // namespace

bool InlineRequest::Pack(const Request& request, InlineTensor* tensor) {
  if (!communicator_->ReducesInline() || request.gpu != nullptr || request.unfused ||
      request.adasum || request.tolerance > 0) {
    return false;
  }
  const int size = communicator_->size(), rank = communicator_->rank();
  const int64_t nbytes = Nbytes(request);
  switch (request.kind) {
    case Request::Kind::kAllReduce:
    case Request::Kind::kReduceScatter: {
      const bool scatters = request.kind == Request::Kind::kReduceScatter;
      if (nbytes > kMaxInlineBytes || (scatters && !HasRows(request))) return false;
      tensor->count = nbytes / static_cast<int64_t>(DTypeSize(request.dtype));
      tensor->dtype = request.dtype;
      tensor->reduction = ReductionOf(request, size);
      if (!scatters && request.tensors.size() == 1) {  // summed where it lies
        tensor->in = request.tensors[0].in;
        tensor->out = request.tensors[0].out;
        return true;
      }
      buffer_.resize(kMaxInlineBytes);
      ForEach(request, [&](const TensorBuffer& one, size_t, int64_t n, int64_t at) {
        std::memcpy(buffer_.data() + at, one.in, n);
      });
      break;
    }
    case Request::Kind::kBroadcast: {
      const int64_t words = (nbytes + kWord - 1) / kWord;
      if (words * kWord > kMaxInlineBytes) return false;
      buffer_.resize(kMaxInlineBytes);
      std::memset(buffer_.data(), 0, words * kWord);
      if (rank == request.root) {
        ForEach(request, [&](const TensorBuffer& one, size_t, int64_t n, int64_t at) {
          std::memcpy(buffer_.data() + at, one.out, n);
        });
      }
      tensor->count = words;
      tensor->dtype = DType::kInt64;
      break;
    }
    case Request::Kind::kAllGather:
    case Request::Kind::kAllToAll: {
      if (!HasRows(request)) return false;
      const std::vector<int64_t> mine = NumbersOf(request, size);
      const int64_t count = static_cast<int64_t>(mine.size()) * size;
      if (count * kWord > kMaxInlineBytes) return false;
      numbers_.assign(count, 0);
      std::copy(mine.begin(), mine.end(), numbers_.begin() + rank * mine.size());
      tensor->in = tensor->out = numbers_.data();
      tensor->count = count;
      tensor->dtype = DType::kInt64;
      return true;
    }
    default: return false;
  }
  tensor->in = tensor->out = buffer_.data();
  return true;
}

bool InlineRequest::Unpack(const Request& request) {
  const int size = communicator_->size(), rank = communicator_->rank();
  switch (request.kind) {
    case Request::Kind::kAllGather:
    case Request::Kind::kAllToAll: return false;
    case Request::Kind::kAllReduce:
      if (request.tensors.size() == 1) return true;
      break;
    case Request::Kind::kBroadcast:
      if (rank == request.root) return true;
      break;
    default: break;
  }
  ForEach(request, [&](const TensorBuffer& one, size_t i, int64_t n, int64_t at) {
    Range part{0, n};
    if (request.kind == Request::Kind::kReduceScatter) {
      part = SharesOf(request, i, size)[rank];
    }
    if (part.count() > 0) std::memcpy(one.out, buffer_.data() + at + part.begin, part.count());
  });
  return true;
}

}  // namespace ddl
