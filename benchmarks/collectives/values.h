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

inline void Check(const float* out, int64_t count, int size, const char* what) {
  const float ranks = static_cast<float>(size * (size - 1) / 2);
  for (int64_t i = 0; i < count; ++i) {
    const float want = static_cast<float>(i % 10007 * size * size) + ranks;
    if (out[i] != want) {
      Die(std::string(what) + ": [" + std::to_string(i) + "] is " + std::to_string(out[i]) +
          ", not " + std::to_string(want));
    }
  }
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_VALUES_H_
