#include "support/stand_in_device.h"

#include <chrono>
#include <filesystem>
#include <string>

#include "device/device_library.h"
#include "support/testing.h"

// Tests of the stand-in beyond the contract of devices: failures and delays on demand.

namespace ours {
namespace {

using testing::StandInDevice;

TEST(stand_in_fails_the_next_call_or_all) {
  const auto device = StandInDevice::make();
  const auto stream = device->make_stream();
  const auto event = device->make_event();
  device->fail_next_call("out of ink");
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, event->record(stream->handle())), "record: out of ink");
  event->record(stream->handle());
  device->synchronize(stream->handle());
  CHECK(event->reached());
  device->fail("an uncorrectable error");
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, event->reached()), "an uncorrectable error");
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, device->make_stream()), "an uncorrectable error");
}

TEST(stand_in_work_that_throws_is_a_failure_of_the_device) {
  const auto device = StandInDevice::make();
  device->run(nullptr, [] { throw std::runtime_error("illegal address"); });
  device->synchronize(nullptr);
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, device->memory(1)), "illegal address");
}

TEST(stand_in_refuses_streams_that_are_gone) {
  const auto device = StandInDevice::make();
  auto stream = device->make_stream();
  const StreamHandle handle = stream->handle();
  stream.reset();
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, device->copy(nullptr, nullptr, 0, handle)), "no such stream");
}

TEST(stand_in_counts_copies_and_knows_captures) {
  const auto device = StandInDevice::make({3, "b", false, 0});
  CHECK_EQ(device->index(), 3);
  CHECK(device->reaches("b") && !device->reaches("a"));
  const auto stream = device->make_stream();
  const auto stopped = device->stop(stream->handle());
  device->copy(nullptr, nullptr, 0, stream->handle());
  CHECK(!device->idle(stream->handle()));
  stopped->go_on();
  device->synchronize(stream->handle());
  CHECK_EQ(device->counts().copies, 1);
  device->set_capturing(stream->handle(), true);
  CHECK(device->is_capturing(stream->handle()));
  device->set_capturing(stream->handle(), false);
  CHECK(!device->is_capturing(stream->handle()));
}

TEST(stand_in_streams_may_share_a_queue) {
  const auto device = StandInDevice::make({0, "a", true, 1});
  const auto one = device->make_stream(), two = device->make_stream();
  const auto stopped = device->stop(one->handle());
  const auto event = device->make_event();
  event->record(two->handle());
  CHECK(!event->reached());  // stopped with the other, as the hardware may do
  stopped->go_on();
  device->synchronize(two->handle());
  CHECK(event->reached());
}

TEST(stand_in_slows_down_what_moves_data) {
  const auto device = StandInDevice::make();
  device->slow_down(std::chrono::milliseconds(20));
  const auto began = Clock::now();
  device->copy(nullptr, nullptr, 0, nullptr);
  device->synchronize(nullptr);
  CHECK(Clock::now() - began >= std::chrono::milliseconds(20));
}

/// The library beside this program.
std::string stand_in_library() { return std::filesystem::canonical("/proc/self/exe").parent_path() / "stand_in.so"; }

TEST(device_library_is_loaded_once_and_has_devices) {
  DeviceLibrary& library = load_device_library(stand_in_library());
  CHECK_EQ(&load_device_library(stand_in_library()), &library);
  CHECK_EQ(library.describe(), "stand-in devices");
  const auto device = library.device(1);
  CHECK_EQ(library.device(1), device);
  CHECK_EQ(device->index(), 1);
  CHECK(device->identity() != library.device(0)->identity());
  CHECK(!library.why_no_vendor_group().empty());
  // Exceptions of the library are those of this program.
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, library.device(99)), "there is no stand-in device 99");
  const auto memory = device->memory(8);
  const auto stream = device->make_stream();
  const auto event = device->make_event();
  device->copy(memory.get(), device->pinned_memory(8).get(), 0, stream->handle());
  event->record(stream->handle());
  wait_reached(*event, Deadline::after(std::chrono::seconds(30)), nullptr, "a copy");
}

TEST(device_library_that_is_missing_or_none_is_named) {
  const auto missing = CHECK_THROWS(DeviceError, load_device_library("/nowhere/_cuda.so"));
  CHECK_CONTAINS(missing, "/nowhere/_cuda.so cannot be loaded");
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, load_device_library("libm.so.6")), "is no library for devices");
}

}  // namespace
}  // namespace ours
