#include "core/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/half.h"

namespace ddl {
namespace {

template <typename T>
void DivideAs(void* values, int64_t count, int divisor) {
  T* elements = static_cast<T*>(values);
  const T by = static_cast<T>(divisor);
  for (int64_t i = 0; i < count; ++i) elements[i] /= by;
}

template <typename T>
int64_t CountDeviationsAs(const void* values, const void* expected, int64_t count,
                          double tolerance) {
  const T* got = static_cast<const T*>(values);
  const T* want = static_cast<const T*>(expected);
  int64_t deviations = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double a = static_cast<double>(got[i]);
    const double b = static_cast<double>(want[i]);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    // Negated so that one NaN alone counts.
    if (!(std::fabs(a - b) <= tolerance * std::max(1.0, std::fabs(b)))) ++deviations;
  }
  return deviations;
}

template <typename T, typename Wide>
void InterpolateAs(const void* a, const void* b, void* out, int64_t count, double weight) {
  const T* from = static_cast<const T*>(a);
  const T* to = static_cast<const T*>(b);
  T* results = static_cast<T*>(out);
  const Wide of_a = static_cast<Wide>(1 - weight), of_b = static_cast<Wide>(weight);
  for (int64_t i = 0; i < count; ++i) {
    results[i] =
        static_cast<T>(of_a * static_cast<Wide>(from[i]) + of_b * static_cast<Wide>(to[i]));
  }
}

}  // namespace

void Divide(void* values, int64_t count, DType dtype, int divisor) {
  switch (dtype) {
    case DType::kFloat32: return DivideAs<float>(values, count, divisor);
    case DType::kFloat64: return DivideAs<double>(values, count, divisor);
    case DType::kInt32: return DivideAs<int32_t>(values, count, divisor);
    case DType::kInt64: return DivideAs<int64_t>(values, count, divisor);
    default: return;
  }
}

int64_t CountDeviations(const void* values, const void* expected, int64_t count, DType dtype,
                        double tolerance) {
  if (IsHalf(dtype)) {
    std::vector<float> got(count), want(count);
    Widen(values, got.data(), count, dtype);
    Widen(expected, want.data(), count, dtype);
    return CountDeviationsAs<float>(got.data(), want.data(), count, tolerance);
  }
  switch (dtype) {
    case DType::kFloat32: return CountDeviationsAs<float>(values, expected, count, tolerance);
    case DType::kFloat64: return CountDeviationsAs<double>(values, expected, count, tolerance);
    case DType::kInt32: return CountDeviationsAs<int32_t>(values, expected, count, tolerance);
    case DType::kInt64: return CountDeviationsAs<int64_t>(values, expected, count, tolerance);
    default: return 0;
  }
}

void Interpolate(const void* a, const void* b, void* out, int64_t count, DType dtype,
                 double weight) {
  if (IsHalf(dtype)) {
    std::vector<float> from(count), to(count);
    Widen(a, from.data(), count, dtype);
    Widen(b, to.data(), count, dtype);
    InterpolateAs<float, float>(from.data(), to.data(), from.data(), count, weight);
    return Narrow(from.data(), out, count, dtype);
  }
  switch (dtype) {
    case DType::kFloat32: return InterpolateAs<float, float>(a, b, out, count, weight);
    case DType::kFloat64: return InterpolateAs<double, double>(a, b, out, count, weight);
    case DType::kInt32: return InterpolateAs<int32_t, double>(a, b, out, count, weight);
    case DType::kInt64: return InterpolateAs<int64_t, double>(a, b, out, count, weight);
    default: return;
  }
}

}  // namespace ddl
