#pragma once

#include <cstddef>
#include <cstdint>

namespace ours {

/// Element types. Their numbers travel in records, and so are part of the protocol between ranks.
enum class DType : uint8_t {
  Bool,
  UInt8,
  Int8,
  UInt16,
  Int16,
  UInt32,
  Int32,
  UInt64,
  Int64,
  Float16,
  BFloat16,
  Float32,
  Float64,
  Complex32,  // two Float16
  Complex64,  // two Float32
  Complex128,
  Float8E4M3FN,
  Float8E5M2,
  Float8E4M3FNUZ,
  Float8E5M2FNUZ,
  Float8E8M0FNU,
  Opaque8,  // any other one-byte type; moved, never reduced
};

size_t size_of(DType dtype);

/// PyTorch's name for the type, e.g. "float32".
const char* name_of(DType dtype);

}  // namespace ours
