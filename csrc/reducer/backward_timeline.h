#pragma once

#include "reducer/overlap.h"
#include "reducer/reducer_options.h"

namespace ours {

/// Adds a step that has ended to the timeline, if that is on (see common/timeline.h): forward, backward with what it
/// computed and what it waited for, and each bucket. `layout_is_new`: the buckets are others than in the step before.
void add_to_timeline(const BackwardTimes& times, const ReducerOptions& options, bool layout_is_new);

}  // namespace ours
