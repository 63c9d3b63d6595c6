#ifndef DDL_CORE_VECTOR_H_
#define DDL_CORE_VECTOR_H_

#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "core/reduction.h"

namespace ddl {

// One pass over memory:
//   out[i] = ((sources[0][i] + sources[1][i]) + ... + sources[sources - 1][i]) / divisor
// or the same with *, or the smallest or largest of them, undivided: a NaN where one is a NaN. It is
// in the order of the sources, so the result does not depend on who computes it. Integers wrap
// around, but for averages of up to 32 bits, which are added in 64. float16 and bfloat16 are added,
// multiplied and divided in float32 and rounded once, with the bits of core/half.
struct Sum {
  const void* const* sources = nullptr;  // one of them may equal `out`; else they do not overlap
  int num_sources = 0;
  void* out = nullptr;
  void* copy = nullptr;  // receives the same as `out` if not null
  int64_t count = 0;     // elements
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;  // of a sum; integers truncate toward zero
  // Hints: see CopyBytes. Not taken for what is rarely large.
  bool non_temporal = false;       // write `out` past the caches, see CopyBytes
  bool non_temporal_copy = false;  // and `copy`
  int prefetch = -1;               // the source to prefetch, see CopyBoth; -1: none
};

// Computes `sum`; its dtype is an integer or real floating-point one.
void Compute(const Sum& sum);

// memcpy in vectors, which from the caches of another processor is faster than the string
// instruction that memcpy may be. With `non_temporal` the stores bypass the caches, which saves the
// read of every line before it is written: for buffers that do not fit in the caches and are not
// read again at once. Only the calling thread sees them in order: call FenceNonTemporalStores
// before signalling another one.
void CopyBytes(void* out, const void* in, int64_t nbytes, bool non_temporal);
void FenceNonTemporalStores();

// An output of so many bytes, or more, that is only moved is written past the caches. Measured on
// two virtual cores: allgathers and alltoalls of 4 and 8 MiB took a third less, broadcasts a tenth.
constexpr int64_t kNonTemporalMoveBytes = int64_t{4} << 20;

struct Copy {
  void* out = nullptr;
  const void* in = nullptr;
  int64_t nbytes = 0;
  bool non_temporal = false;  // as CopyBytes
};

// Two copies that do not overlap, a little of each in turn: one that waits for its input to come
// from memory and one that waits for its output to go there take little longer than either. The
// input of `first` is fetched ahead, also over page boundaries, where processors do not by
// themselves: for input that is not in the caches, and goes on behind this copy.
void CopyBoth(const Copy& first, const Copy& second);

// What the loops use on this processor: "avx512f", "avx2" or "sse2", "neon", else "portable".
const char* VectorInstructions();

// Makes them use others, for tests: call it while nobody else computes. False, and no change, where
// this processor has not got them.
bool UseVectorInstructions(const std::string& name);

}  // namespace ddl

#endif  // DDL_CORE_VECTOR_H_
