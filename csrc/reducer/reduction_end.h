#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "reducer/overlap.h"

// How the reducer learns when a reduction ended, which may be long before the end of backward waits for it.

namespace ours {

/// The time at which a reduction ended, or -1 before that. A callback on another thread writes it, and shares it
/// because the callback may outlive the bucket.
using EndStamp = std::shared_ptr<std::atomic<int64_t>>;

/// Has the end of `work` stamped. Null if that is not needed, because the Work tells it, or not possible: without
/// `on_cpu` a future completes long before the accelerator has run the reduction.
EndStamp stamp_end(c10d::Work& work, bool on_cpu);
EndStamp stamp_end(c10::ivalue::Future& future, bool on_cpu);

/// Fills in the times of a reduction that was found done at `seen` after waiting since `asked`. `work` may be null.
void note_reduction(BucketTimes& times, const c10d::Work* work, const EndStamp& stamp, int64_t asked, int64_t seen);

}  // namespace ours
