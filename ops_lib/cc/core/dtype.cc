#include "core/dtype.h"

namespace ddl {
namespace {

struct Row {
  const char* name;
  size_t nbytes;
};

// In the order of DType.
constexpr Row kRows[] = {
    {"float32", 4},  {"float64", 8}, {"int32", 4}, {"int64", 8},     {"float16", 2},
    {"bfloat16", 2}, {"int8", 1},    {"uint8", 1}, {"int16", 2},     {"uint16", 2},
    {"uint32", 4},   {"uint64", 8},  {"bool", 1},  {"complex64", 8}, {"complex128", 16},
};

}  // namespace

const char* DTypeName(DType dtype) { return kRows[static_cast<int>(dtype)].name; }

bool FindDType(const std::string& name, DType* dtype) {
  for (size_t row = 0; row < sizeof(kRows) / sizeof(kRows[0]); ++row) {
    if (name != kRows[row].name) continue;
    *dtype = static_cast<DType>(row);
    return true;
  }
  return false;
}

size_t DTypeSize(DType dtype) { return kRows[static_cast<int>(dtype)].nbytes; }

}  // namespace ddl
