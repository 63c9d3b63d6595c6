#ifndef DDL_CORE_ARITHMETIC_H_
#define DDL_CORE_ARITHMETIC_H_

#include <cstdint>

#include "core/dtype.h"

namespace ddl {

// Divides `count` elements in place. Integers truncate toward zero, as C++ does. Only for the
// dtypes that can be reduced: float32, float64, int32, int64.
void Divide(void* values, int64_t count, DType dtype, int divisor);

// How many of `count` elements differ by more than tolerance * max(1, |expected|). NaN equals NaN
// only. Same dtypes as Divide, and float16 and bfloat16.
int64_t CountDeviations(const void* values, const void* expected, int64_t count, DType dtype,
                        double tolerance);

// out = (1 - weight) * a + weight * b, element by element. `out` may be `a` or `b`. Integers are
// interpolated as float64 and truncate toward zero. Same dtypes as CountDeviations.
void Interpolate(const void* a, const void* b, void* out, int64_t count, DType dtype,
                 double weight);

}  // namespace ddl

#endif  // DDL_CORE_ARITHMETIC_H_
