#ifndef DDL_TESTS_VALUES_H_
#define DDL_TESTS_VALUES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
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

// What values repeat after.
constexpr int64_t kPeriod = 10007;

// What element `index` of rank `rank` is: differs by both, so that a wrong peer or offset shows, and
// stays exact in float32 when summed over the ranks. Negative ones too.
inline int64_t ValueOf(int64_t index, int rank, int size) {
  return (index % kPeriod) * size + rank - 5003 * size;
}

// The sum over `size` ranks, divided.
template <typename T>
T TotalOf(int64_t index, int size, int divisor) {
  const int64_t total = size * ValueOf(index, 0, size) + int64_t{size} * (size - 1) / 2;
  return static_cast<T>(total) / static_cast<T>(divisor);
}

// Inputs of `size` ranks: element 0 is the smallest number of all, 1 the largest; then ranks take
// turns with those two, and the rest are close to them.
template <typename T>
std::vector<std::vector<T>> LimitsOf(int size, int64_t count) {
  using Limits = std::numeric_limits<T>;
  std::vector<std::vector<T>> inputs(size, std::vector<T>(count));
  for (int rank = 0; rank < size; ++rank) {
    for (int64_t i = 0; i < count; ++i) {
      const bool smallest = i % 4 == 0 || (i % 4 == 2 && rank % 2 == 0);
      const T off = static_cast<T>((i / 4 + rank) % 100);
      inputs[rank][i] = static_cast<T>(i < 4    ? (smallest ? Limits::min() : Limits::max())
                                       : smallest ? Limits::min() + off
                                                  : Limits::max() - off);
    }
  }
  return inputs;
}

// The average of integers: their sum in 64 bits, divided toward zero.
template <typename T>
T AverageOf(const std::vector<std::vector<T>>& inputs, int64_t index, int divisor) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  uint64_t total = 0;  // which wraps around where a signed one may not
  for (const std::vector<T>& input : inputs) total += static_cast<uint64_t>(input[index]);
  return static_cast<T>(static_cast<Wide>(total) / static_cast<Wide>(divisor));
}

// What `value` gives for `count` indices from `begin` on. One period is computed and then copied:
// sanitizers look at each element that is computed, and at a copy as a whole.
template <typename T, typename Function>
std::vector<T> Repeated(int64_t begin, int64_t count, const Function& value) {
  std::vector<T> values(count);
  const int64_t computed = std::min(count, kPeriod);
  for (int64_t i = 0; i < computed; ++i) values[i] = static_cast<T>(value(begin + i));
  for (int64_t i = computed; i < count; i += kPeriod) {
    std::memcpy(values.data() + i, values.data(), std::min(count - i, kPeriod) * sizeof(T));
  }
  return values;
}

// Whether two hold the same bits.
template <typename T>
bool Same(const std::vector<T>& one, const std::vector<T>& other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size() * sizeof(T)) == 0);
}

// The values of a rank, `count` of them from `begin` on.
template <typename T>
std::vector<T> ValuesOf(int64_t count, int rank, int size, int64_t begin = 0) {
  return Repeated<T>(begin, count, [=](int64_t index) { return ValueOf(index, rank, size); });
}

// Checks `count` values, the first of which has the index `begin`, against the totals.
template <typename T>
void CheckTotals(const T* got, int64_t count, int64_t begin, int size, int divisor,
                 const std::string& where) {
  const std::vector<T> want = Repeated<T>(
      begin, count, [=](int64_t index) { return TotalOf<T>(index, size, divisor); });
  if (count == 0 || std::memcmp(got, want.data(), count * sizeof(T)) == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    if (got[i] == want[i]) continue;
    CHECK(false, where + " of " + std::to_string(count) + " elements: [" +
                     std::to_string(begin + i) + "] is " + std::to_string(got[i]) + ", not " +
                     std::to_string(want[i]));
    return;
  }
}

template <typename T>
void CheckTotal(const std::vector<T>& got, int size, int divisor, const std::string& where) {
  CheckTotals(got.data(), static_cast<int64_t>(got.size()), 0, size, divisor, where);
}

#endif  // DDL_TESTS_VALUES_H_
