#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"

// The one way to release memory, tensors or mappings that a device or a peer may still touch when the owner no longer
// needs them. They are set aside here, and destroyed once it is certain that nothing touches them any more.
//
// Nothing waits for that, and there is no thread: each of these calls checks what is set aside, and a group checks
// when it is made and when it ends. What is still in use at the end of the process goes with it.

namespace ours {

/// Destroys `owned`, on the calling thread, as soon as a check finds that `is_over()` is true; the first check is
/// now. If `is_over()` throws, it counts as false.
void release_when(std::function<bool()> is_over, std::shared_ptr<void> owned) noexcept;

/// The same, once the device has done all that `streams` have been given by now; never if it has failed.
void release_after(Device& device, const std::vector<StreamHandle>& streams, std::shared_ptr<void> owned) noexcept;

/// Destroys what nothing touches any more.
void release_deferred() noexcept;

/// The number of things set aside, for tests.
size_t count_deferred();

}  // namespace ours
