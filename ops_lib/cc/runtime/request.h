#ifndef DDL_RUNTIME_REQUEST_H_
#define DDL_RUNTIME_REQUEST_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl_communicator.h"
#include "core/dtype.h"
#include "core/status.h"

namespace ddl {

// One tensor of a collective. The memory belongs to the caller until the request is done.
struct TensorBuffer {
  const void* in = nullptr;
  void* out = nullptr;  // may equal `in`
  int64_t count = 0;    // elements
  std::vector<int64_t> dims;
};

// One collective, as a kernel hands it to the engine.
struct Request {
  enum class Kind { kBroadcast, kAllReduce, kAllGather };

  Kind kind = Kind::kAllReduce;
  std::string op_name;   // as users know it: "AllReduceN"
  std::string name;      // the same on every rank
  std::string instance;  // which of several runs of the op in one graph, where loops run it
  // All ranks submit this one at the same place among the ordered ones, because something above
  // keeps the order. Else they find out which comes first.
  bool ordered = true;
  // Not worth a stall: fails with Unavailable, and the group goes on, if rank 0 asks for it and all
  // ranks that do not are seen to wait with something else.
  bool gives_way = false;
  DType dtype = DType::kFloat32;
  int root = 0;            // whose values are broadcast
  bool average = false;    // divide the sum by the number of ranks
  bool unfused = false;    // the baseline: one MPI_Allreduce for each tensor
  double tolerance = 0.0;  // > 0: compare with the baseline
  std::vector<TensorBuffer> tensors;
  std::shared_ptr<GpuPlace> place;  // of all tensors; null: the host's memory
  // For kAllGather, whose one tensor has no `out`: called once, by the engine's thread, when the
  // first dimensions of all ranks are known; sets `out` to memory for all of them.
  std::function<Status(const std::vector<int64_t>& sizes, void** out)> allocate;
  std::function<void(const Status&)> done;  // called once, by the engine's thread
  std::chrono::steady_clock::time_point submitted;  // set by the engine
};

// One collective's way through the engine.
struct Passage {
  using Time = std::chrono::steady_clock::time_point;

  const Request& request;
  Status status = {};   // how it ended
  Time turn = {};       // nothing is before it any more
  Time agreed = {};     // all ranks are at it
  Time end = {};
  int64_t nbytes = 0;   // of the result
  bool packed = false;  // its tensors went with the agreement: nothing was left to do after it
};

}  // namespace ddl

#endif  // DDL_RUNTIME_REQUEST_H_
