#pragma once

#include <cstdint>
#include <memory>

#include "reducer/overlap.h"
#include "reducer/reducer_options.h"

namespace ours {

/// Adds the steps of a model to the timeline, if that is on (see common/timeline.h).
class BackwardTimeline {
 public:
  /// A step that has ended: forward, backward with what it computed and what it waited for, and each bucket.
  void add(const BackwardTimes& times, const ReducerOptions& options);

 private:
  std::shared_ptr<const BucketLayout> named_;  ///< the buckets whose names the timeline has
  uint32_t named_in_ = 0;                      ///< the session of that timeline
};

}  // namespace ours
