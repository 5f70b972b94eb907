#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#include "support/stand_in_device.h"

// The stand-in devices as torch's PrivateUse1, for tests: their tensors live in host memory, and copies and fills are
// done by the threads of the streams, whenever these come to it.

namespace stand_in {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

ours::testing::StandInDevice& device(c10::DeviceIndex index);

/// The current stream of the calling thread on that device. Its id is the stream's handle, 0 of the default stream.
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);
ours::StreamHandle handle_of(c10::Stream stream);

/// Gives the current stream of device `index` work to do.
void enqueue(c10::DeviceIndex index, std::function<void()> work);
void synchronize(c10::DeviceIndex index);

/// Memory that is filled with garbage before its first use, and again when the streams that used it have come to where
/// it was given up.
c10::Allocator* allocator();

}  // namespace stand_in
