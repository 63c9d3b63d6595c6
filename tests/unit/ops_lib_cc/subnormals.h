#ifndef DDL_TESTS_SUBNORMALS_H_
#define DDL_TESTS_SUBNORMALS_H_

#if defined(__x86_64__)
#include <pmmintrin.h>
#endif

// Lets this thread take subnormal numbers for zeros, as TensorFlow's threads do.
inline void FlushSubnormals() {
#if defined(__x86_64__)
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(1L << 24));
#endif
}

// Whether this thread computes with them.
inline bool KeepsSubnormals() {
  volatile float number = 0x1p-140f;
  number = number * 0x1p100f;
  return number == 0x1p-40f;
}

#endif  // DDL_TESTS_SUBNORMALS_H_
