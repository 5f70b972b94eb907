#pragma once

#include <cstdint>

namespace ours {

/// What one rank called. It must agree on all ranks.
struct CallRecord {
  uint64_t seq;
  uint64_t count;  ///< elements, if all ranks must give the same number; otherwise 0
  double factor;   ///< for PREMUL_SUM
  int32_t root;    ///< -1 where the operation has none
  uint8_t op;      ///< Op
  uint8_t dtype;   ///< DType
  uint8_t kind;    ///< ReduceKind
  uint8_t unused;  ///< 0, so that records can be compared and sent as bytes
};
static_assert(sizeof(CallRecord) == 32);

}  // namespace ours
