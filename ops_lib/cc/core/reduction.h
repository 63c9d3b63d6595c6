#ifndef DDL_CORE_REDUCTION_H_
#define DDL_CORE_REDUCTION_H_

#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace ddl {

enum class ReduceOp : unsigned char { kSum, kMin, kMax, kProduct };

// What becomes of the elements of all ranks. A number stands for their sum, divided by it.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;  // of a sum; integers truncate toward zero

  Reduction(int by) : divisor(by) {}  // NOLINT: so that a sum needs no more words than before
  Reduction(ReduceOp what, int by) : op(what), divisor(by) {}

  // The same, to be divided by `by` instead.
  Reduction DividedBy(int by) const { return {op, by}; }
};

// Whether it averages integers of up to 32 bits. Those are added in 64 bits, so that the sum does not
// wrap around where the average is a number of the type: the elements of all ranks at once, because
// between ranks they travel as what they are.
bool SumsWide(DType dtype, const Reduction& reduction);

// The name users know ("min"), static storage.
const char* ReduceOpName(ReduceOp op);

// The op of that name. False, and no change, if there is none.
bool FindReduceOp(const std::string& name, ReduceOp* op);

// Fills `count` elements with what changes no result: 0 for a sum, the largest number for a minimum
// (infinity where there is one), the smallest for a maximum, 1 for a product.
void FillNeutral(void* values, int64_t count, DType dtype, ReduceOp op);

}  // namespace ddl

#endif  // DDL_CORE_REDUCTION_H_
