#pragma once

#include <cstdint>

#include "collectives/op.h"
#include "common/deadline.h"
#include "common/dtype.h"

namespace ours {

/// What accompanies every collective call: what it is (checked against the peers' calls) and how long it may take.
struct Call {
  Op op;
  DType dtype;
  uint64_t seq;  ///< number of the collective in its process group; must agree on all ranks
  Deadline deadline;
};

}  // namespace ours
