#include "common/dtype.h"

#include <array>

namespace ours {
namespace {

struct Row {
  DType dtype;
  size_t bytes;
  const char* name;
};

// In the order of the enum, so that its value is the index.
constexpr std::array<Row, 22> kRows{{
    {DType::Bool, 1, "bool"},
    {DType::UInt8, 1, "uint8"},
    {DType::Int8, 1, "int8"},
    {DType::UInt16, 2, "uint16"},
    {DType::Int16, 2, "int16"},
    {DType::UInt32, 4, "uint32"},
    {DType::Int32, 4, "int32"},
    {DType::UInt64, 8, "uint64"},
    {DType::Int64, 8, "int64"},
    {DType::Float16, 2, "float16"},
    {DType::BFloat16, 2, "bfloat16"},
    {DType::Float32, 4, "float32"},
    {DType::Float64, 8, "float64"},
    {DType::Complex32, 4, "complex32"},
    {DType::Complex64, 8, "complex64"},
    {DType::Complex128, 16, "complex128"},
    {DType::Float8E4M3FN, 1, "float8_e4m3fn"},
    {DType::Float8E5M2, 1, "float8_e5m2"},
    {DType::Float8E4M3FNUZ, 1, "float8_e4m3fnuz"},
    {DType::Float8E5M2FNUZ, 1, "float8_e5m2fnuz"},
    {DType::Float8E8M0FNU, 1, "float8_e8m0fnu"},
    {DType::Opaque8, 1, "opaque8"},
}};

constexpr bool in_enum_order() {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<size_t>(kRows[i].dtype) != i) return false;
  }
  return true;
}
static_assert(in_enum_order(), "kRows must follow the order of DType");

// A value that came over the wire may be outside the enum.
constexpr Row kUnknown{DType::Opaque8, 0, "unknown"};

const Row& row_of(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < kRows.size() ? kRows[index] : kUnknown;
}

}  // namespace

size_t size_of(DType dtype) { return row_of(dtype).bytes; }

const char* name_of(DType dtype) { return row_of(dtype).name; }

}  // namespace ours
