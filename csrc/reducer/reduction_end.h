#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "reducer/overlap.h"

// How the reducer learns when a reduction ended, which may be long before backward asks for it.

namespace ours {

/// Where a callback on another thread writes the time at which a reduction ended; -1: not yet. The callback shares it,
/// as it may outlive the bucket.
using EndStamp = std::shared_ptr<std::atomic<int64_t>>;

/// Has the end of `work` stamped. Null where that is not needed, as the Work will tell by itself, or not possible.
/// `on_cpu`: on accelerators a future completes long before the reduction has run, so that there is nothing to stamp.
EndStamp stamp_end(c10d::Work& work, bool on_cpu);
EndStamp stamp_end(c10::ivalue::Future& future, bool on_cpu);

/// Fills in the times of a reduction that was seen done at `seen` after waiting since `asked`. `work` may be null.
void note_reduction(BucketTimes& times, const c10d::Work* work, const EndStamp& stamp, int64_t asked, int64_t seen);

}  // namespace ours
