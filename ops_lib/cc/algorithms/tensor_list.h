#ifndef DDL_ALGORITHMS_TENSOR_LIST_H_
#define DDL_ALGORITHMS_TENSOR_LIST_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ddl {

// A tensor to be reduced.
struct TensorSpan {
  const void* in = nullptr;
  void* out = nullptr;  // may equal `in`
  int64_t count = 0;    // elements
};

// Tensors one behind the other, as if they were one: what is moved in pieces is cut without regard
// to where one ends. Each begins at a cache line of that sequence, so that pieces of it can be
// written by non-temporal stores; the gaps before them are never touched.
class TensorList {
 public:
  static constexpr int64_t kLine = 64;

  // `element`: bytes of one.
  TensorList(const std::vector<TensorSpan>& tensors, int64_t element) {
    parts_.reserve(tensors.size());
    for (const TensorSpan& tensor : tensors) {
      if (tensor.count == 0) continue;
      const int64_t begin = (nbytes_ + kLine - 1) / kLine * kLine;
      nbytes_ = begin + tensor.count * element;
      parts_.push_back({static_cast<const char*>(tensor.in), static_cast<char*>(tensor.out), begin,
                        nbytes_});
    }
  }

  // From the begin of the first to the end of the last.
  int64_t nbytes() const { return nbytes_; }

  // Calls function(in, out, at, n) for each stretch of a tensor in the `nbytes` from `begin` on: n
  // bytes, at bytes behind `begin`, with the tensor's addresses of them.
  template <typename Function>
  void ForEach(int64_t begin, int64_t nbytes, Function function) const {
    const int64_t end = begin + nbytes;
    auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                                 [](int64_t at, const Part& one) { return at < one.end; });
    for (; part != parts_.end() && part->begin < end; ++part) {
      const int64_t from = std::max(begin, part->begin), to = std::min(end, part->end);
      const int64_t within = from - part->begin;
      // Not every use has both.
      function(part->in == nullptr ? nullptr : part->in + within,
               part->out == nullptr ? nullptr : part->out + within, from - begin, to - from);
    }
  }

 private:
  struct Part {
    const char* in;
    char* out;
    int64_t begin, end;
  };
  std::vector<Part> parts_;
  int64_t nbytes_ = 0;
};

}  // namespace ddl

#endif  // DDL_ALGORITHMS_TENSOR_LIST_H_
