#include "comm/nccl_library.h"

#include <dlfcn.h>

#include <string>
#include <vector>

namespace ddl {
namespace {

Status Open(const std::vector<const char*>& names, const char* fix, void** library) {
  std::string error;
  for (const char* name : names) {
    *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (*library != nullptr) return Status();
    if (error.empty()) error = dlerror();
  }
  return Status(Code::kFailedPrecondition, error + ". " + fix);
}

template <typename Function>
Status LookUp(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return Status();
  return Status(Code::kFailedPrecondition,
                std::string(dlerror()) + ". Install NCCL 2.14 or newer, and CUDA 12 or newer.");
}

#define DDL_LOOK_UP(library, name) DDL_RETURN_IF_ERROR(LookUp(library, #name, &found->name))

Status Find(NcclLibrary* found) {
  void *driver = nullptr, *cuda = nullptr, *nccl = nullptr;
  DDL_RETURN_IF_ERROR(Open({"libcuda.so.1"}, "Install NVIDIA's driver to use GPUs.", &driver));
  DDL_RETURN_IF_ERROR(Open({"libcudart.so.12", "libcudart.so.13"},
                           "Install CUDA's runtime: pip install nvidia-cuda-runtime-cu12", &cuda));
  DDL_RETURN_IF_ERROR(
      Open({"libnccl.so.2"}, "Install NCCL: pip install nvidia-nccl-cu12", &nccl));
  DDL_LOOK_UP(nccl, ncclGetVersion);
  DDL_LOOK_UP(nccl, ncclGetUniqueId);
  DDL_LOOK_UP(nccl, ncclCommInitRankConfig);
  DDL_LOOK_UP(nccl, ncclCommGetAsyncError);
  DDL_LOOK_UP(nccl, ncclCommAbort);
  DDL_LOOK_UP(nccl, ncclGroupStart);
  DDL_LOOK_UP(nccl, ncclGroupEnd);
  DDL_LOOK_UP(nccl, ncclAllReduce);
  DDL_LOOK_UP(nccl, ncclBroadcast);
  DDL_LOOK_UP(nccl, ncclGetErrorString);
  DDL_LOOK_UP(nccl, ncclGetLastError);
  DDL_LOOK_UP(cuda, cudaSetDevice);
  DDL_LOOK_UP(cuda, cudaStreamCreateWithFlags);
  DDL_LOOK_UP(cuda, cudaStreamDestroy);
  DDL_LOOK_UP(cuda, cudaStreamWaitEvent);
  DDL_LOOK_UP(cuda, cudaEventCreateWithFlags);
  DDL_LOOK_UP(cuda, cudaEventDestroy);
  DDL_LOOK_UP(cuda, cudaEventRecord);
  DDL_LOOK_UP(cuda, cudaEventQuery);
  DDL_LOOK_UP(cuda, cudaGetErrorString);
  return Status();
}

#undef DDL_LOOK_UP

}  // namespace

Status LoadNccl(const NcclLibrary** library) {
  // Never closed: threads of NCCL and CUDA run until the process ends.
  static NcclLibrary found{};
  static const Status status = Find(&found);
  *library = &found;
  return status;
}

}  // namespace ddl
