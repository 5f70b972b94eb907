#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"

// The one way to release what a device, or a peer, may still touch when its owner has no more use for it: memory,
// tensors, mappings. It is set aside here, and destroyed once it is certain that nothing touches it any more.
//
// Nobody waits for that, and there is no thread: what is set aside is looked at with each of these calls, and a group
// looks when it ends and when it is asked for memory. What is still in use at the end of the process goes with it.

namespace ours {

/// Destroys `owned`, on the calling thread, as soon as a look finds `is_over()` true; the first look is now. Where
/// `is_over()` throws, it is not over.
void release_when(std::function<bool()> is_over, std::shared_ptr<void> owned) noexcept;

/// The same, once the device has done all that `streams` have been given by now; never where it has failed.
void release_after(Device& device, const std::vector<StreamHandle>& streams, std::shared_ptr<void> owned) noexcept;

/// Destroys what nothing touches any more.
void release_deferred() noexcept;

/// How much is set aside, for tests.
size_t count_deferred();

}  // namespace ours
