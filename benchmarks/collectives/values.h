#ifndef DDL_BENCHMARKS_COLLECTIVES_VALUES_H_
#define DDL_BENCHMARKS_COLLECTIVES_VALUES_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "require.h"

// Begins at a cache line, as TensorFlow's tensors do.
struct Buffer {
  explicit Buffer(int64_t count)
      : values(static_cast<float*>(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64)), std::free) {
  }
  std::unique_ptr<float, void (*)(void*)> values;
  float* get() { return values.get(); }
};

inline float ValueOf(int64_t index, int rank, int size) {
  return static_cast<float>(index % 10007 * size + rank);
}

// Of all ranks' values.
inline float SumOf(int64_t index, int size) {
  return static_cast<float>(index % 10007 * size * size) +
         static_cast<float>(size * (size - 1) / 2);
}

[[noreturn]] inline void DieOfWrong(const std::string& what, int64_t index, float is, float want) {
  Die(what + ": [" + std::to_string(index) + "] is " + std::to_string(is) + ", not " +
      std::to_string(want));
}

inline void Check(const float* out, int64_t count, int size, const char* what) {
  for (int64_t i = 0; i < count; ++i) {
    if (out[i] != SumOf(i, size)) DieOfWrong(what, i, out[i], SumOf(i, size));
  }
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_VALUES_H_
