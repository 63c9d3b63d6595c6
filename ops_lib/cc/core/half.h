#ifndef DDL_CORE_HALF_H_
#define DDL_CORE_HALF_H_

#include <cstdint>

#include "core/dtype.h"

namespace ddl {

// float16 and bfloat16, the types that are added in float32.
bool IsHalf(DType dtype);

// Reads `count` elements of a half type as float32: exact. A signalling NaN becomes a quiet one.
void Widen(const void* halves, float* floats, int64_t count, DType dtype);

// Writes `count` float32 as a half type, each rounded once, to the nearest (ties to even). What is
// too large becomes infinity, what is small a subnormal number, a NaN stays one. The same bits with
// the processor's own instructions (F16C or NEON, where it has them) and without.
// Source: IEEE 754-2019 section 4.3.1.
void Narrow(const float* floats, void* halves, int64_t count, DType dtype);

}  // namespace ddl

#endif  // DDL_CORE_HALF_H_
