#include "runtime/fused_allreduce.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/arithmetic.h"
#include "core/half.h"

namespace ddl {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;
// From here on a tensor is reduced where it lies: the copy would cost more than a message.
constexpr int64_t kLargeBytes = int64_t{256} << 10;
// From here on a piece of half type is reduced in shares: two messages, of half the bytes each.
constexpr int64_t kManyHalves = int64_t{32} << 10;

}  // namespace

Status FusedAllReduce::Run(const Request& request) {
  if (request.tolerance > 0) return RunChecked(request);
  return request.unfused ? RunUnfused(request) : RunFused(request);
}

Status FusedAllReduce::ReducePiece(const Request& request, const void* in, void* out,
                                   int64_t count) {
  if (IsHalf(request.dtype)) return ReduceWidened(request, in, out, count);
  DDL_RETURN_IF_ERROR(communicator_->AllReduceSum(in, out, count, request.dtype));
  if (request.average) Divide(out, count, request.dtype, communicator_->size());
  return Status();
}

Status FusedAllReduce::ReduceWidened(const Request& request, const void* in, void* out,
                                     int64_t count) {
  if (static_cast<int64_t>(wide_.size()) < count) wide_.resize(count);
  Widen(in, wide_.data(), count, request.dtype);
  DDL_RETURN_IF_ERROR(
      communicator_->AllReduceSum(wide_.data(), wide_.data(), count, DType::kFloat32));
  if (request.average) Divide(wide_.data(), count, DType::kFloat32, communicator_->size());
  Narrow(wide_.data(), out, count, request.dtype);
  return Status();
}

Status FusedAllReduce::ReduceFusedPiece(const Request& request, const void* in, void* out,
                                        int64_t count) {
  const bool in_shares = IsHalf(request.dtype) && count >= kManyHalves && communicator_->size() > 1;
  return in_shares ? ReduceInShares(request, in, out, count) : ReducePiece(request, in, out, count);
}

Status FusedAllReduce::ReduceInShares(const Request& request, const void* in, void* out,
                                      int64_t count) {
  const int size = communicator_->size();
  const int64_t largest = (count + size - 1) / size;
  std::vector<int64_t> nbytes(size);
  for (int rank = 0; rank < size; ++rank) {
    const int64_t first = std::min(rank * largest, count);
    nbytes[rank] = (std::min(first + largest, count) - first) * sizeof(uint16_t);
  }
  const int64_t mine = nbytes[communicator_->rank()] / sizeof(uint16_t);
  if (static_cast<int64_t>(share_sum_.size()) < largest) {
    shares_.resize(largest * size);
    share_sum_.resize(largest);
  }
  DDL_RETURN_IF_ERROR(communicator_->ExchangeShares(in, shares_.data(), nbytes));
  constexpr int64_t kBlock = 2048;  // both blocks stay in the first cache
  float sum[kBlock], next[kBlock];
  for (int64_t first = 0; first < mine; first += kBlock) {
    const int64_t n = std::min(kBlock, mine - first);
    Widen(shares_.data() + first, sum, n, request.dtype);
    for (int rank = 1; rank < size; ++rank) {
      Widen(shares_.data() + rank * mine + first, next, n, request.dtype);
      for (int64_t i = 0; i < n; ++i) sum[i] += next[i];
    }
    if (request.average) Divide(sum, n, DType::kFloat32, size);
    Narrow(sum, share_sum_.data() + first, n, request.dtype);
  }
  return communicator_->AllGather(share_sum_.data(), out, nbytes);
}

Status FusedAllReduce::RunUnfused(const Request& request) {
  for (const TensorBuffer& tensor : request.tensors) {
    DDL_RETURN_IF_ERROR(ReducePiece(request, tensor.in, tensor.out, tensor.count));
  }
  return Status();
}

Status FusedAllReduce::RunFused(const Request& request) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  for (const TensorBuffer& tensor : request.tensors) {
    const int64_t nbytes = tensor.count * element;
    if (nbytes >= kLargeBytes || request.tensors.size() == 1) {
      for (int64_t first = 0; first < nbytes; first += kPieceBytes) {
        const int64_t count = std::min(kPieceBytes, nbytes - first) / element;
        DDL_RETURN_IF_ERROR(ReduceFusedPiece(request, static_cast<const char*>(tensor.in) + first,
                                             static_cast<char*>(tensor.out) + first, count));
      }
      continue;
    }
    if (nbytes == 0) continue;
    if (packed_nbytes_ + nbytes > kPieceBytes) DDL_RETURN_IF_ERROR(Flush(request));
    if (buffer_.empty()) buffer_.resize(kPieceBytes);
    std::memcpy(buffer_.data() + packed_nbytes_, tensor.in, nbytes);
    packed_.push_back(&tensor);
    packed_nbytes_ += nbytes;
  }
  return Flush(request);
}

Status FusedAllReduce::Flush(const Request& request) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  const Status reduced =
      ReduceFusedPiece(request, buffer_.data(), buffer_.data(), packed_nbytes_ / element);
  const char* from = buffer_.data();
  for (const TensorBuffer* tensor : packed_) {
    std::memcpy(tensor->out, from, tensor->count * element);
    from += tensor->count * element;
  }
  packed_.clear();
  packed_nbytes_ = 0;
  return reduced;
}

Status FusedAllReduce::RunChecked(const Request& request) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  // First, because outputs may overwrite the inputs.
  std::vector<std::vector<char>> expected;
  for (const TensorBuffer& tensor : request.tensors) {
    expected.emplace_back(tensor.count * element);
    DDL_RETURN_IF_ERROR(ReducePiece(request, tensor.in, expected.back().data(), tensor.count));
  }
  DDL_RETURN_IF_ERROR(request.unfused ? RunUnfused(request) : RunFused(request));
  std::vector<double> deviations;
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    deviations.push_back(static_cast<double>(
        CountDeviations(request.tensors[i].out, expected[i].data(), request.tensors[i].count,
                        request.dtype, request.tolerance)));
  }
  // Summed over the ranks, so that all of them fail together.
  DDL_RETURN_IF_ERROR(communicator_->AllReduceSum(deviations.data(), deviations.data(),
                                                  static_cast<int64_t>(deviations.size()),
                                                  DType::kFloat64));
  for (size_t i = 0; i < deviations.size(); ++i) {
    if (deviations[i] == 0) continue;
    return Status(Code::kInternal,
                  request.op_name + " \"" + request.name + "\": tensor " + std::to_string(i) +
                      " has " + std::to_string(static_cast<int64_t>(deviations[i])) +
                      " elements (over all ranks) that differ from MPI_Allreduce by more than " +
                      std::to_string(request.tolerance) +
                      ". Raise check for sums of very different magnitudes; else report a bug.");
  }
  return Status();
}

}  // namespace ddl
