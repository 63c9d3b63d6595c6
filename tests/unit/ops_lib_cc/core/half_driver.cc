// core/half.h for ctypes.

#include "core/half.h"

extern "C" {

void widen(const void* halves, float* floats, int64_t count, int brain) {
  ddl::Widen(halves, floats, count, brain ? ddl::DType::kBfloat16 : ddl::DType::kFloat16);
}

void narrow(const float* floats, void* halves, int64_t count, int brain) {
  ddl::Narrow(floats, halves, count, brain ? ddl::DType::kBfloat16 : ddl::DType::kFloat16);
}

}  // extern "C"
