#include "runtime/fused_allreduce.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/arithmetic.h"
#include "core/half.h"

namespace ddl {
namespace {

constexpr int64_t kBufferBytes = int64_t{4} << 20;
// From here on a tensor is reduced where it lies: the copy would cost more than a message.
constexpr int64_t kLargeBytes = int64_t{256} << 10;
// From here on a piece of half type is reduced in shares: two messages, of half the bytes each.
constexpr int64_t kManyHalves = int64_t{32} << 10;
constexpr int64_t kHalvesInPiece = int64_t{2} << 20;

}  // namespace

bool FusedAllReduce::Pack(const Request& request, SmallTensor* tensor) {
  if (!communicator_->CanMeet() || request.kind != Request::Kind::kAllReduce || request.unfused ||
      request.tolerance > 0 || TravelsWidened(request.dtype)) {
    return false;
  }
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  int64_t nbytes = 0;
  for (const TensorBuffer& one : request.tensors) nbytes += one.count * element;
  if (nbytes > kMaxOfferBytes) return false;
  tensor->count = nbytes / element;
  tensor->dtype = request.dtype;
  tensor->divisor = Divisor(request);
  if (request.tensors.size() == 1) {
    tensor->in = request.tensors[0].in;
    tensor->out = request.tensors[0].out;
    return true;
  }
  for (const TensorBuffer& one : request.tensors) {
    if (one.count > 0) Append(one, one.count * element);
  }
  tensor->in = tensor->out = buffer_.data();
  return true;
}

void FusedAllReduce::Unpack(const Request& request) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  const char* from = buffer_.data();
  for (const TensorBuffer* tensor : packed_) {
    std::memcpy(tensor->out, from, tensor->count * element);
    from += tensor->count * element;
  }
  Forget();
}

void FusedAllReduce::Forget() {
  packed_.clear();
  packed_nbytes_ = 0;
}

Status FusedAllReduce::Run(const Request& request) {
  if (request.tolerance > 0) return RunChecked(request);
  return request.unfused ? RunUnfused(request) : RunFused(request);
}

bool FusedAllReduce::TravelsWidened(DType dtype) const {
  return IsHalf(dtype) && !communicator_->SumsHalves();
}

int FusedAllReduce::Divisor(const Request& request) const {
  return request.average ? communicator_->size() : 1;
}

template <typename SumFloats>
Status FusedAllReduce::ReduceWidened(const Request& request, const void* in, void* out,
                                     int64_t count, SumFloats sum_floats) {
  if (static_cast<int64_t>(wide_.size()) < count) wide_.resize(count);
  Widen(in, wide_.data(), count, request.dtype);
  DDL_RETURN_IF_ERROR(sum_floats(wide_.data()));
  Narrow(wide_.data(), out, count, request.dtype);
  return Status();
}

Status FusedAllReduce::Reduce(const Request& request, const void* in, void* out, int64_t count) {
  if (!TravelsWidened(request.dtype)) {
    return communicator_->AllReduce(in, out, count, request.dtype, Divisor(request));
  }
  for (int64_t first = 0; first < count; first += kHalvesInPiece) {
    const int64_t n = std::min(kHalvesInPiece, count - first);
    DDL_RETURN_IF_ERROR(ReduceHalves(request, static_cast<const uint16_t*>(in) + first,
                                     static_cast<uint16_t*>(out) + first, n));
  }
  return Status();
}

Status FusedAllReduce::ReduceBaseline(const Request& request, const void* in, void* out,
                                      int64_t count) {
  if (IsHalf(request.dtype)) {
    return ReduceWidened(request, in, out, count, [&](float* wide) {
      DDL_RETURN_IF_ERROR(communicator_->AllReduceBaseline(wide, wide, count, DType::kFloat32));
      Divide(wide, count, DType::kFloat32, Divisor(request));
      return Status();
    });
  }
  DDL_RETURN_IF_ERROR(communicator_->AllReduceBaseline(in, out, count, request.dtype));
  if (request.average) Divide(out, count, request.dtype, communicator_->size());
  return Status();
}

Status FusedAllReduce::ReduceHalves(const Request& request, const void* in, void* out,
                                    int64_t count) {
  if (count >= kManyHalves && communicator_->size() > 1) {
    return ReduceInShares(request, in, out, count);
  }
  return ReduceWidened(request, in, out, count, [&](float* wide) {
    return communicator_->AllReduce(wide, wide, count, DType::kFloat32, Divisor(request));
  });
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
    DDL_RETURN_IF_ERROR(ReduceBaseline(request, tensor.in, tensor.out, tensor.count));
  }
  return Status();
}

Status FusedAllReduce::RunFused(const Request& request) {
  Forget();  // what a request that failed has left
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  for (const TensorBuffer& tensor : request.tensors) {
    const int64_t nbytes = tensor.count * element;
    if (nbytes == 0) continue;
    if (nbytes >= kLargeBytes || request.tensors.size() == 1) {
      DDL_RETURN_IF_ERROR(Reduce(request, tensor.in, tensor.out, tensor.count));
      continue;
    }
    if (packed_nbytes_ + nbytes > kBufferBytes) DDL_RETURN_IF_ERROR(Flush(request));
    Append(tensor, nbytes);
  }
  return Flush(request);
}

void FusedAllReduce::Append(const TensorBuffer& tensor, int64_t nbytes) {
  if (buffer_.empty()) buffer_.resize(kBufferBytes);
  std::memcpy(buffer_.data() + packed_nbytes_, tensor.in, nbytes);
  packed_.push_back(&tensor);
  packed_nbytes_ += nbytes;
}

Status FusedAllReduce::Flush(const Request& request) {
  if (packed_.empty()) return Status();
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  const Status reduced =
      Reduce(request, buffer_.data(), buffer_.data(), packed_nbytes_ / element);
  if (reduced.ok()) {
    Unpack(request);
  } else {
    Forget();
  }
  return reduced;
}

Status FusedAllReduce::RunChecked(const Request& request) {
  const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
  // First, because outputs may overwrite the inputs.
  std::vector<std::vector<char>> expected;
  for (const TensorBuffer& tensor : request.tensors) {
    expected.emplace_back(tensor.count * element);
    DDL_RETURN_IF_ERROR(
        ReduceBaseline(request, tensor.in, expected.back().data(), tensor.count));
  }
  DDL_RETURN_IF_ERROR(request.unfused ? RunUnfused(request) : RunFused(request));
  std::vector<double> deviations;
  for (size_t i = 0; i < request.tensors.size(); ++i) {
    deviations.push_back(static_cast<double>(
        CountDeviations(request.tensors[i].out, expected[i].data(), request.tensors[i].count,
                        request.dtype, request.tolerance)));
  }
  // Summed over the ranks, so that all of them fail together.
  DDL_RETURN_IF_ERROR(communicator_->AllReduce(deviations.data(), deviations.data(),
                                               static_cast<int64_t>(deviations.size()),
                                               DType::kFloat64, 1));
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
