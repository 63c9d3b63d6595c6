// Compiles only if our declarations of NCCL and CUDA fit their headers. Then asks the libraries
// themselves, as far as that goes on a machine without a GPU.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <type_traits>

#include "comm/nccl_communicator.h"
#include "comm/nccl_library.h"

namespace {

using ddl::NcclLibrary;

// Whether a `Theirs` can be passed as an `Ours` in C: the same type; an enum as int; a structure of
// the same size and alignment; or a pointer to such.
template <typename Theirs, typename Ours>
constexpr bool Fits() {
  if constexpr (std::is_same_v<Theirs, Ours>) {
    return true;
  } else if constexpr (std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>) {
    using TheirTarget = std::remove_pointer_t<Theirs>;
    return std::is_same_v<TheirTarget, ncclConfig_t> ||  // compared below
           Fits<TheirTarget, std::remove_pointer_t<Ours>>();
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
  } else if constexpr (std::is_class_v<Theirs> && std::is_class_v<Ours>) {
    return sizeof(Theirs) == sizeof(Ours) && alignof(Theirs) == alignof(Ours) &&
           std::is_trivially_copyable_v<Theirs> && std::is_trivially_copyable_v<Ours>;
  }
  return false;
}

template <typename TheirResult, typename... Theirs, typename OurResult, typename... Ours>
constexpr bool FunctionFits(TheirResult (*)(Theirs...), OurResult (*)(Ours...)) {
  if constexpr (sizeof...(Theirs) == sizeof...(Ours)) {
    return Fits<TheirResult, OurResult>() && (Fits<Theirs, Ours>() && ...);
  }
  return false;
}

#define DDL_FITS(name)                                                                     \
  static_assert(FunctionFits(decltype(&::name){nullptr}, decltype(NcclLibrary::name){nullptr}), \
                #name " is declared differently")

DDL_FITS(ncclGetVersion);
DDL_FITS(ncclGetUniqueId);
DDL_FITS(ncclCommInitRankConfig);
DDL_FITS(ncclCommGetAsyncError);
DDL_FITS(ncclCommAbort);
DDL_FITS(ncclGroupStart);
DDL_FITS(ncclGroupEnd);
DDL_FITS(ncclAllReduce);
DDL_FITS(ncclBroadcast);
DDL_FITS(ncclGetErrorString);
DDL_FITS(ncclGetLastError);
DDL_FITS(cudaSetDevice);
DDL_FITS(cudaStreamCreateWithFlags);
DDL_FITS(cudaStreamDestroy);
DDL_FITS(cudaStreamWaitEvent);
DDL_FITS(cudaEventCreateWithFlags);
DDL_FITS(cudaEventDestroy);
DDL_FITS(cudaEventRecord);
DDL_FITS(cudaEventQuery);
DDL_FITS(cudaGetErrorString);

constexpr ncclConfig_t kDefaults = NCCL_CONFIG_INITIALIZER;
static_assert(offsetof(ddl::NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(ddl::NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(ddl::NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(ddl::NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(ddl::NcclConfig) <= sizeof(ncclConfig_t));
static_assert(ddl::NcclConfig{}.magic == kDefaults.magic);
static_assert(ddl::NcclConfig{}.version == NCCL_VERSION(2, 14, 0));
static_assert(ddl::NcclConfig{}.unset == NCCL_CONFIG_UNDEF_INT);

static_assert(ddl::kNcclSuccess == ncclSuccess && ddl::kNcclInProgress == ncclInProgress);
static_assert(ddl::kNcclBytes == ncclInt8 && ddl::kNcclFloat16 == ncclFloat16);
static_assert(ddl::kNcclFloat32 == ncclFloat32 && ddl::kNcclFloat64 == ncclFloat64);
static_assert(ddl::kNcclBfloat16 == ncclBfloat16);
static_assert(ddl::kNcclSum == ncclSum && ddl::kNcclAverage == ncclAvg);
static_assert(ddl::kNcclProduct == ncclProd && ddl::kNcclMax == ncclMax &&
              ddl::kNcclMin == ncclMin);
static_assert(ddl::kCudaSuccess == cudaSuccess && ddl::kCudaNotReady == cudaErrorNotReady);
static_assert(ddl::kCudaEventDisableTiming == cudaEventDisableTiming);
static_assert(ddl::kCudaStreamNonBlocking == cudaStreamNonBlocking);

}  // namespace

int main() {
  const NcclLibrary* library = nullptr;
  const ddl::Status found = ddl::LoadNccl(&library);
  if (!found.ok()) {
    std::fprintf(stderr, "%s\n", found.message().c_str());
    return 1;
  }
  int version = 0;
  const int asked = library->ncclGetVersion(&version);
  const bool same = version == NCCL_VERSION_CODE;
  std::printf("nccl %d, its headers %d\n", version, NCCL_VERSION_CODE);
  ddl::GpuContext place;
  const ddl::Status marked = ddl::MarkReady(*library, &place);
  std::printf("gpu: %s\n", marked.ok() ? "found" : marked.message().c_str());
  return asked == ddl::kNcclSuccess && same ? 0 : 1;
}
