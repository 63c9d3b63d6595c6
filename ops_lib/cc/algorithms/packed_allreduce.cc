#include "algorithms/packed_allreduce.h"

#include <cstring>

namespace ddl {
namespace {

constexpr int64_t kBufferBytes = int64_t{4} << 20;
// From here on a tensor is reduced where it lies: the copy would cost more than a message.
constexpr int64_t kLargeBytes = int64_t{256} << 10;

}  // namespace

Status PackedAllReduce::Run(const std::vector<TensorSpan>& tensors, DType dtype,
                            const Reduce& reduce) {
  packed_.clear();  // of a run that failed
  packed_nbytes_ = 0;
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  for (const TensorSpan& tensor : tensors) {
    const int64_t nbytes = tensor.count * element;
    if (nbytes == 0) continue;
    if (nbytes >= kLargeBytes || tensors.size() == 1) {
      DDL_RETURN_IF_ERROR(reduce(tensor.in, tensor.out, tensor.count));
      continue;
    }
    if (packed_nbytes_ + nbytes > kBufferBytes) DDL_RETURN_IF_ERROR(Flush(element, reduce));
    if (buffer_.empty()) buffer_.resize(kBufferBytes);
    std::memcpy(buffer_.data() + packed_nbytes_, tensor.in, nbytes);
    packed_.push_back(&tensor);
    packed_nbytes_ += nbytes;
  }
  return Flush(element, reduce);
}

Status PackedAllReduce::Flush(int64_t element, const Reduce& reduce) {
  if (packed_.empty()) return Status();
  DDL_RETURN_IF_ERROR(reduce(buffer_.data(), buffer_.data(), packed_nbytes_ / element));
  const char* from = buffer_.data();
  for (const TensorSpan* tensor : packed_) {
    std::memcpy(tensor->out, from, tensor->count * element);
    from += tensor->count * element;
  }
  packed_.clear();
  packed_nbytes_ = 0;
  return Status();
}

}  // namespace ddl
