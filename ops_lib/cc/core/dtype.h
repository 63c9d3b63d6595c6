#ifndef DDL_CORE_DTYPE_H_
#define DDL_CORE_DTYPE_H_

#include <cstddef>
#include <string>

namespace ddl {

enum class DType : unsigned char {
  kFloat32,
  kFloat64,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kInt8,
  kUint8,
  kInt16,
  kUint16,
  kUint32,
  kUint64,
  kBool,
  kComplex64,
  kComplex128,
};

// The name users know ("float32"), static storage.
const char* DTypeName(DType dtype);

// The type of that name. False, and no change, if there is none.
bool FindDType(const std::string& name, DType* dtype);

// Bytes of one element.
size_t DTypeSize(DType dtype);

}  // namespace ddl

#endif  // DDL_CORE_DTYPE_H_
