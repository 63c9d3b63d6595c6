#ifndef DDL_TESTS_VALUES_H_
#define DDL_TESTS_VALUES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "core/dtype.h"

template <typename T>
constexpr ddl::DType kDTypeOf = ddl::DType::kFloat32;
template <>
inline constexpr ddl::DType kDTypeOf<double> = ddl::DType::kFloat64;
template <>
inline constexpr ddl::DType kDTypeOf<int32_t> = ddl::DType::kInt32;
template <>
inline constexpr ddl::DType kDTypeOf<int64_t> = ddl::DType::kInt64;
template <>
inline constexpr ddl::DType kDTypeOf<int8_t> = ddl::DType::kInt8;
template <>
inline constexpr ddl::DType kDTypeOf<uint8_t> = ddl::DType::kUint8;
template <>
inline constexpr ddl::DType kDTypeOf<int16_t> = ddl::DType::kInt16;
template <>
inline constexpr ddl::DType kDTypeOf<uint16_t> = ddl::DType::kUint16;
template <>
inline constexpr ddl::DType kDTypeOf<uint32_t> = ddl::DType::kUint32;
template <>
inline constexpr ddl::DType kDTypeOf<uint64_t> = ddl::DType::kUint64;

// What element `index` of rank `rank` is: differs by both, so that a wrong peer or offset shows, and
// stays exact in float32 when summed over the ranks. Negative ones too.
inline int64_t ValueOf(int64_t index, int rank, int size) {
  return (index % 10007) * size + rank - 5003 * size;
}

template <typename T>
std::vector<T> ValuesOf(int64_t count, int rank, int size) {
  std::vector<T> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(ValueOf(i, rank, size));
  return values;
}

// The sum over `size` ranks, divided.
template <typename T>
T TotalOf(int64_t index, int size, int divisor) {
  const int64_t total = size * ValueOf(index, 0, size) + int64_t{size} * (size - 1) / 2;
  return static_cast<T>(total) / static_cast<T>(divisor);
}

template <typename T>
void CheckTotal(const std::vector<T>& got, int size, int divisor, const std::string& where) {
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    if (got[i] == TotalOf<T>(i, size, divisor)) continue;
    CHECK(false, where + " of " + std::to_string(got.size()) + " elements: [" + std::to_string(i) +
                     "] is " + std::to_string(got[i]) + ", not " +
                     std::to_string(TotalOf<T>(i, size, divisor)));
    return;
  }
}

#endif  // DDL_TESTS_VALUES_H_
