#pragma once

#include <cstdint>

#include "collectives/op.h"
#include "common/deadline.h"
#include "common/dtype.h"

namespace ours {

class Arrivals;
class StopNotice;

/// How much of its operation a call is for.
enum class Part : uint8_t {
  Whole,      ///< all of it, or what its beginning has left
  Beginning,  ///< what waits for nobody; until the same call comes for the whole, no peer waits for this rank
};

/// What accompanies every collective call: what it is (checked against the peers' calls) and how long it may take.
struct Call {
  Op op;
  DType dtype;
  uint64_t seq;  ///< number of the collective in its process group; must agree on all ranks
  Deadline deadline;
  Clock::time_point called = Clock::now();  ///< when the program made the call, which may then have been queued
  Arrivals* arrivals = nullptr;             ///< where to note when the ranks made it; null: nobody asks
  StopNotice* stop = nullptr;               ///< whether a rank was asked to stop; null: nobody asks
  Part part = Part::Whole;
};

}  // namespace ours
