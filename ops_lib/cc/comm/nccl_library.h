#ifndef DDL_COMM_NCCL_LIBRARY_H_
#define DDL_COMM_NCCL_LIBRARY_H_

#include <climits>
#include <cstddef>

#include "core/gpu_context.h"
#include "core/status.h"

// NCCL's own name, so that its handles and ours are one type.
struct ncclComm;

namespace ddl {

using NcclComm = ncclComm*;

// ncclUniqueId
struct NcclUniqueId {
  char bytes[128];
};

// ncclConfig_t as it was in NCCL 2.14, which every later NCCL accepts: it reads `size` bytes of it
// and gives the fields that are younger than `version` their defaults.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
  int unset = INT_MIN;
};

// ncclResult_t, ncclDataType_t, ncclRedOp_t, cudaError_t and flags, as far as we use them.
inline constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
inline constexpr int kNcclBytes = 0, kNcclFloat16 = 6, kNcclFloat32 = 7, kNcclFloat64 = 8,
                     kNcclBfloat16 = 9;
inline constexpr int kNcclSum = 0, kNcclProduct = 1, kNcclMax = 2, kNcclMin = 3, kNcclAverage = 4;
inline constexpr int kCudaSuccess = 0, kCudaNotReady = 600;
inline constexpr unsigned int kCudaEventDisableTiming = 2, kCudaStreamNonBlocking = 1;

// The functions of NCCL and of CUDA's runtime that we call, by their own names.
//
// They are declared here and looked up at run time, instead of included and linked, so that there
// is one library of ours for all machines, and building it needs neither of theirs. (nccl.h alone
// draws in headers of four packages.) Both are plain C with stable interfaces; that these
// declarations fit theirs is for the compiler to say: `make check-nccl`.
struct NcclLibrary {
  int (*ncclGetVersion)(int* version);
  int (*ncclGetUniqueId)(NcclUniqueId* id);
  int (*ncclCommInitRankConfig)(NcclComm* comm, int size, NcclUniqueId id, int rank,
                                NcclConfig* config);
  int (*ncclCommGetAsyncError)(NcclComm comm, int* state);
  int (*ncclCommAbort)(NcclComm comm);
  int (*ncclGroupStart)();
  int (*ncclGroupEnd)();
  int (*ncclAllReduce)(const void* in, void* out, size_t count, int dtype, int op, NcclComm comm,
                       CudaStream stream);
  int (*ncclBroadcast)(const void* in, void* out, size_t count, int dtype, int root, NcclComm comm,
                       CudaStream stream);
  const char* (*ncclGetErrorString)(int result);
  const char* (*ncclGetLastError)(NcclComm comm);

  int (*cudaSetDevice)(int gpu);
  int (*cudaStreamCreateWithFlags)(CudaStream* stream, unsigned int flags);
  int (*cudaStreamDestroy)(CudaStream stream);
  int (*cudaStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned int flags);
  int (*cudaEventCreateWithFlags)(CudaEvent* event, unsigned int flags);
  int (*cudaEventDestroy)(CudaEvent event);
  int (*cudaEventRecord)(CudaEvent event, CudaStream stream);
  int (*cudaEventQuery)(CudaEvent event);
  const char* (*cudaGetErrorString)(int error);
};

// Finds the libraries, once: what is already loaded, else what the loader finds. FailedPrecondition
// names what is missing: the driver (libcuda.so.1), the runtime, NCCL, or a function of theirs.
// Calls none of them: the driver would take CUDA_VISIBLE_DEVICES as it is now, and a script may set
// it later.
Status LoadNccl(const NcclLibrary** library);

}  // namespace ddl

#endif  // DDL_COMM_NCCL_LIBRARY_H_
