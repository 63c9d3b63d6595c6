#ifndef DDL_RUNTIME_REQUEST_H_
#define DDL_RUNTIME_REQUEST_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/gpu_context.h"
#include "core/reduction.h"
#include "core/status.h"

namespace ddl {

// One tensor of a collective. The memory belongs to the caller until the request is done.
struct TensorBuffer {
  const void* in = nullptr;
  void* out = nullptr;  // may equal `in`
  int64_t count = 0;    // elements
  std::vector<int64_t> dims;  // not needed where the request has a signature
};

// What ranks compare of a request, in the form in which they do: see runtime/description.h. It
// stays the same from step to step, so a kernel makes it once for the shapes that it has.
struct Signature {
  uint64_t digest[2] = {0, 0};
  std::vector<std::vector<int64_t>> dims;  // of each tensor
};

// One collective, as a kernel hands it to the engine.
struct Request {
  enum class Kind {
    kBroadcast,
    kAllReduce,
    kAllGather,
    kReduceScatter,
    kAllToAll,
    kJoin,          // contribute zeros to whatever the other ranks reduce, until all have joined
    kCancelNotice,  // the engine's own: tells the others of a request that was cancelled
  };

  Kind kind = Kind::kAllReduce;
  std::string op_name;   // as users know it: "AllReduceN"
  std::string name;      // the same on every rank
  std::string instance;  // which of several runs of the op in one graph, where loops run it
  // All ranks submit this one at the same position among the ordered ones of its stream, because
  // something above keeps the order. Else they agree which comes first.
  bool ordered = true;
  // Who asks, and keeps the order where there is one: the name of a thread of the program, the same
  // on every rank. Empty: the main thread, or a request that is known by its name alone.
  std::string stream;
  int64_t step = -1;  // of the training; -1: not known
  std::optional<float> rate;  // at which the step learns, if the ranks are to compare it
  // Requests of one run of a graph fail together, because TensorFlow ends a run at its first error.
  // Process-wide; 0: this one fails alone.
  int64_t run = 0;
  // Which of the sessions of this process runs the graph. 0: not known.
  uint64_t session = 0;
  std::string hint;  // what to do where another rank asks for something else in its place
  // Instead of a stall it fails with Unavailable, and the group goes on, if rank 0 asks for it and
  // all ranks that do not have reported that they wait for something else.
  bool optional = false;
  DType dtype = DType::kFloat32;
  int root = 0;            // whose values are broadcast
  ReduceOp op = ReduceOp::kSum;
  bool average = false;    // divide the sum by the number of ranks that contribute
  bool adasum = false;     // in place of a sum: see comm/adasum.h
  bool unfused = false;    // the baseline: one MPI_Allreduce for each tensor
  double tolerance = 0.0;  // > 0: compare with the baseline
  std::vector<TensorBuffer> tensors;
  std::shared_ptr<const Signature> signature;  // null: the engine makes it
  std::shared_ptr<void> memory;  // keeps what the tensors point to, also after a cancellation
  std::shared_ptr<GpuContext> gpu;  // of all tensors; null: the host's memory
  // For kAllGather and kAllToAll, whose tensors have no `out`: called once, by the engine's thread,
  // when it is known how many rows come from each rank, of tensor t from rank r sizes[t * ranks + r];
  // sets outs[t] to memory for all of them.
  std::function<Status(const std::vector<int64_t>& sizes, void** outs)> allocate;
  // For kAllToAll: rows of its one tensor for each rank; empty: equally many. Others may differ.
  std::vector<int64_t> splits;
  // Set by whoever cancels it, and then does not wait for `done`; see
  // Engine::NotifyCancelled. Null: it is never cancelled.
  std::shared_ptr<std::atomic<bool>> cancelled;
  // For kJoin: gets the last rank that joined, before `done`.
  std::function<void(int last)> joined;
  std::function<void(const Status&)> done;  // called once, by the engine's thread
  // Set by the engine.
  std::chrono::steady_clock::time_point submitted;
  int contributors = 0;  // ranks that do not just add zeros; 0: all

  bool IsCancelled() const { return cancelled != nullptr && cancelled->load(); }
  const std::vector<int64_t>& dims(size_t tensor) const {
    return signature != nullptr ? signature->dims[tensor] : tensors[tensor].dims;
  }
};

// How it reduces, among `size` ranks of which some perhaps only add zeros.
inline Reduction ReductionOf(const Request& request, int size) {
  if (!request.average) return {request.op, 1};
  return {request.op, request.contributors > 0 ? request.contributors : size};
}

// How one collective went through the engine, for timeline, statistics and progress.
struct CollectiveRecord {
  using Time = std::chrono::steady_clock::time_point;

  const Request& request;
  Status status = {};   // how it ended
  Time start = {};  // nothing is before it any more
  Time agreed = {};     // all ranks are at it
  Time end = {};
  int64_t nbytes = 0;   // of the result
  bool inlined = false;  // reduced inline, with the agreement: nothing was left to do after it
};

}  // namespace ddl

#endif  // DDL_RUNTIME_REQUEST_H_
