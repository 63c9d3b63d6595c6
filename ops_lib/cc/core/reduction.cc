#include "core/reduction.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

namespace ddl {
namespace {

// In the order of ReduceOp.
constexpr const char* kNames[] = {"sum", "min", "max", "prod"};

template <typename T>
T NeutralOf(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case ReduceOp::kMin: return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case ReduceOp::kMax: return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    case ReduceOp::kProduct: return T{1};
    case ReduceOp::kSum: break;
  }
  return T{0};
}

template <typename T>
void FillAs(void* values, int64_t count, T value) {
  std::fill_n(static_cast<T*>(values), count, value);
}

// The bits of a half: zero, infinity, minus infinity or one.
uint16_t NeutralHalf(ReduceOp op, DType dtype) {
  const bool brain = dtype == DType::kBfloat16;
  switch (op) {
    case ReduceOp::kMin: return brain ? 0x7f80 : 0x7c00;
    case ReduceOp::kMax: return brain ? 0xff80 : 0xfc00;
    case ReduceOp::kProduct: return brain ? 0x3f80 : 0x3c00;
    case ReduceOp::kSum: break;
  }
  return 0;
}

}  // namespace

bool SumsWide(DType dtype, const Reduction& reduction) {
  if (reduction.op != ReduceOp::kSum || reduction.divisor == 1) return false;
  switch (dtype) {
    case DType::kInt8:
    case DType::kUint8:
    case DType::kInt16:
    case DType::kUint16:
    case DType::kInt32:
    case DType::kUint32: return true;
    default: return false;
  }
}

const char* ReduceOpName(ReduceOp op) { return kNames[static_cast<int>(op)]; }

bool FindReduceOp(const std::string& name, ReduceOp* op) {
  for (size_t row = 0; row < std::size(kNames); ++row) {
    if (name != kNames[row]) continue;
    *op = static_cast<ReduceOp>(row);
    return true;
  }
  return false;
}

void FillNeutral(void* values, int64_t count, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32: return FillAs(values, count, NeutralOf<float>(op));
    case DType::kFloat64: return FillAs(values, count, NeutralOf<double>(op));
    case DType::kInt32: return FillAs(values, count, NeutralOf<int32_t>(op));
    case DType::kInt64: return FillAs(values, count, NeutralOf<int64_t>(op));
    case DType::kInt8: return FillAs(values, count, NeutralOf<int8_t>(op));
    case DType::kUint8: return FillAs(values, count, NeutralOf<uint8_t>(op));
    case DType::kInt16: return FillAs(values, count, NeutralOf<int16_t>(op));
    case DType::kUint16: return FillAs(values, count, NeutralOf<uint16_t>(op));
    case DType::kUint32: return FillAs(values, count, NeutralOf<uint32_t>(op));
    case DType::kUint64: return FillAs(values, count, NeutralOf<uint64_t>(op));
    case DType::kFloat16:
    case DType::kBfloat16: return FillAs(values, count, NeutralHalf(op, dtype));
    default: std::memset(values, 0, count * DTypeSize(dtype));
  }
}

}  // namespace ddl
