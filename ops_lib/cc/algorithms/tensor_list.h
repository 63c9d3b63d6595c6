#ifndef DDL_ALGORITHMS_TENSOR_LIST_H_
#define DDL_ALGORITHMS_TENSOR_LIST_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "algorithms/range.h"

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

// A tensor of which each rank has a share, or gets one: shares[r] are bytes of the whole, the same
// on every rank.
struct SharedTensor {
  const void* in = nullptr;  // the whole where it is scattered, this rank's share where gathered
  void* out = nullptr;       // the other of the two
  std::vector<Range> shares;
};

// The shares of many tensors one behind the other, rank by rank, so that all that belongs to a rank
// is one range of the sequence.
class ShareList {
 public:
  // Whole inputs, of which `rank` gets its shares.
  static ShareList Scattered(const std::vector<SharedTensor>& tensors, int rank) {
    return ShareList(tensors, [rank](const SharedTensor& tensor, int of) {
      return TensorSpan{static_cast<const char*>(tensor.in) + tensor.shares[of].begin,
                        of == rank ? tensor.out : nullptr, tensor.shares[of].count()};
    });
  }

  // Whole outputs, to which `rank` brings its shares.
  static ShareList Gathered(const std::vector<SharedTensor>& tensors, int rank) {
    return ShareList(tensors, [rank](const SharedTensor& tensor, int of) {
      return TensorSpan{of == rank ? tensor.in : nullptr,
                        static_cast<char*>(tensor.out) + tensor.shares[of].begin,
                        tensor.shares[of].count()};
    });
  }

  const TensorList& tensors() const { return tensors_; }
  // Of each rank, in the sequence.
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  template <typename SpanOf>
  ShareList(const std::vector<SharedTensor>& tensors, SpanOf span_of) : tensors_({}, 1) {
    std::vector<TensorSpan> spans;
    int64_t end = 0;
    const auto at_line = [&end] {
      return (end + TensorList::kLine - 1) / TensorList::kLine * TensorList::kLine;
    };
    const int size = tensors.empty() ? 0 : static_cast<int>(tensors[0].shares.size());
    for (int rank = 0; rank < size; ++rank) {
      const int64_t begin = at_line();
      for (const SharedTensor& tensor : tensors) {
        spans.push_back(span_of(tensor, rank));
        if (spans.back().count > 0) end = at_line() + spans.back().count;
      }
      ranges_.push_back({begin, std::max(begin, end)});
    }
    tensors_ = TensorList(spans, 1);
  }

  TensorList tensors_;
  std::vector<Range> ranges_;
};

}  // namespace ddl

#endif  // DDL_ALGORITHMS_TENSOR_LIST_H_
