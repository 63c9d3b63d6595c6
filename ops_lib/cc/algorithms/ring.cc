#include "algorithms/ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/vector.h"

namespace ddl {
namespace {

constexpr int64_t kSegmentBytes = int64_t{256} << 10;
// Segments to be received that the transport knows of at once, and as many to be sent.
constexpr int64_t kPipelineDepth = 4;

// All steps of a ring as one sequence of segments, numbered through: segment t belongs to step t /
// J of J segments each. In step s this rank sends chunk r - s and receives chunk r - s - 1; so what
// it receives as t it sends as t + J.
class Ring {
 public:
  // `chunks` are bytes of `out`, one for each rank. In the first `reducing` steps what comes is
  // added, or what else `reduction` says, and divided in the last of them; in the others it is stored.
  Ring(Transport* transport, const void* in, void* out, std::vector<Range> chunks, int reducing,
       int steps, DType dtype, Reduction reduction)
      : transport_(*transport),
        in_(static_cast<const char*>(in)),
        out_(static_cast<char*>(out)),
        chunks_(std::move(chunks)),
        reducing_(reducing),
        dtype_(dtype),
        reduction_(reduction) {
    int64_t largest = 0;
    for (const Range& chunk : chunks_) largest = std::max(largest, chunk.count());
    segments_ = (largest + kSegmentBytes - 1) / kSegmentBytes;
    total_ = steps * segments_;
    if (reducing_ > 0) {
      room_ = std::min(largest, kSegmentBytes);
      incoming_ = transport_.Scratch(kPipelineDepth * room_);
    }
  }

  Status Run() {
    for (int64_t t = 0; t < total_; ++t) {
      DDL_RETURN_IF_ERROR(BeginReceives(t));
      DDL_RETURN_IF_ERROR(BeginSends(t));
      DDL_RETURN_IF_ERROR(transport_.AwaitReceive());
      if (Step(t) < reducing_) Add(t);
    }
    return transport_.AwaitSends(0);
  }

 private:
  int64_t Step(int64_t t) const { return t / segments_; }

  Range Segment(int64_t t, int64_t chunk) const {
    const Range& all = chunks_[chunk];
    const int64_t begin = std::min(all.end, all.begin + t % segments_ * kSegmentBytes);
    return {begin, std::min(all.end, begin + kSegmentBytes)};
  }
  Range Sent(int64_t t) const {
    const int64_t size = transport_.size();
    return Segment(t, (transport_.rank() + 2 * size - Step(t)) % size);
  }
  Range Received(int64_t t) const { return Sent(t + segments_); }

  char* Incoming(int64_t t) { return incoming_ + t % kPipelineDepth * room_; }

  // Segments before `now` are received and added.
  Status BeginReceives(int64_t now) {
    const int from = (transport_.rank() + transport_.size() - 1) % transport_.size();
    for (; received_ < std::min(total_, now + kPipelineDepth); ++received_) {
      const Range segment = Received(received_);
      char* to = Incoming(received_);
      if (Step(received_) >= reducing_) {
        to = out_ + segment.begin;
        // While it was summed up it was sent from here.
        const int64_t occupant = received_ - reducing_ * segments_;
        if (reducing_ > 0) {
          if (occupant >= sent_) break;
          DDL_RETURN_IF_ERROR(transport_.AwaitSends(sent_ - 1 - occupant));
        }
      }
      DDL_RETURN_IF_ERROR(transport_.Receive(from, to, segment.count()));
    }
    return Status();
  }

  Status BeginSends(int64_t now) {
    const int to = (transport_.rank() + 1) % transport_.size();
    for (; sent_ < std::min(total_, now + std::min(segments_, kPipelineDepth)); ++sent_) {
      const Range segment = Sent(sent_);
      const char* from = Step(sent_) == 0 ? in_ : out_;
      DDL_RETURN_IF_ERROR(transport_.Send(to, from + segment.begin, segment.count()));
    }
    return Status();
  }

  void Add(int64_t t) {
    const Range segment = Received(t);
    const void* sources[] = {Incoming(t), in_ + segment.begin};
    Sum sum;
    sum.sources = sources;
    sum.num_sources = 2;
    sum.out = out_ + segment.begin;
    sum.count = segment.count() / static_cast<int64_t>(DTypeSize(dtype_));
    sum.dtype = dtype_;
    sum.op = reduction_.op;
    sum.divisor = Step(t) == reducing_ - 1 ? reduction_.divisor : 1;
    Compute(sum);
  }

  Transport& transport_;
  const char* in_;
  char* out_;
  const std::vector<Range> chunks_;
  const int64_t reducing_;
  const DType dtype_;
  const Reduction reduction_;
  int64_t segments_ = 0, total_ = 0;
  int64_t received_ = 0, sent_ = 0;  // begun
  int64_t room_ = 0;  // of a segment in incoming_
  char* incoming_ = nullptr;
};

}  // namespace

Status RingAllReduce(Transport* transport, const void* in, void* out, int64_t count, DType dtype,
                     Reduction reduction) {
  const int size = transport->size();
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  if (size == 1) {
    Sum sum;
    sum.sources = &in;
    sum.num_sources = 1;
    sum.out = out;
    sum.count = count;
    sum.dtype = dtype;
    sum.op = reduction.op;
    sum.divisor = reduction.divisor;
    Compute(sum);
    return Status();
  }
  std::vector<Range> chunks(size);
  for (int rank = 0; rank < size; ++rank) {
    const Range elements = EqualPart(count, size, rank);
    chunks[rank] = {elements.begin * element, elements.end * element};
  }
  return Ring(transport, in, out, std::move(chunks), size - 1, 2 * (size - 1), dtype, reduction)
      .Run();
}

Status RingAllGather(Transport* transport, const void* in, void* out, std::vector<Range> ranges) {
  const Range own = ranges[transport->rank()];
  char* to = static_cast<char*>(out) + own.begin;
  if (own.count() > 0 && in != to) std::memcpy(to, in, own.count());
  return Ring(transport, out, out, std::move(ranges), 0, transport->size() - 1, DType::kInt8, 1)
      .Run();
}

}  // namespace ddl
