#ifndef DDL_CORE_GPU_CONTEXT_H_
#define DDL_CORE_GPU_CONTEXT_H_

#include <memory>

// CUDA's own names, so that its handles and ours are one type.
struct CUstream_st;
struct CUevent_st;

namespace ddl {

using CudaStream = CUstream_st*;
using CudaEvent = CUevent_st*;

// The GPU in whose memory tensors lie, and when they may be used.
struct GpuContext {
  int device = 0;                     // its number in CUDA's order, in this process
  CudaStream stream = nullptr;        // in which it works on these tensors
  std::shared_ptr<CUevent_st> ready;  // reached when that work is done; see MarkReady
};

}  // namespace ddl

#endif  // DDL_CORE_GPU_CONTEXT_H_
