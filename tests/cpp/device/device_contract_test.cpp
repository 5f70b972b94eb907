#include "support/device_contract.h"

#include <cstdint>

#include "support/testing.h"

// What Device promises for streams, events and memory, tested on any device (see device_contract.h).

namespace ours {
namespace {

using std::chrono::milliseconds;
using testing::OnDevice;

constexpr size_t kBytes = 4096;

std::vector<char> bytes_of(char value) { return std::vector<char>(kBytes, value); }

TEST(device_has_an_identity_and_reaches_itself) {
  const auto device = testing::contract_device();
  CHECK(!device->identity().empty());
  CHECK(!device->hardware().empty());
  CHECK(device->reaches(device->identity()));
}

TEST(device_pinned_memory_is_zero_and_aligned) {
  const auto device = testing::contract_device();
  for (size_t bytes : {size_t{1}, size_t{5000}, size_t{3} << 20}) {
    for (int again = 0; again < 2; ++again) {
      const auto memory = device->pinned_memory(bytes);
      auto* data = static_cast<char*>(memory.get());
      CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
      for (size_t i = 0; i < bytes; ++i) CHECK_EQ(data[i], 0);
      std::memset(data, 7, bytes);
    }
  }
}

TEST(device_copies_between_host_and_device) {
  OnDevice on(kBytes, 2);
  std::vector<char> data(kBytes);
  for (size_t i = 0; i < kBytes; ++i) data[i] = static_cast<char>(i * 7);
  on.put(on.at(0), data.data(), kBytes);
  on.device->copy(on.at(1) + 1, on.at(0) + 3, 1000, on.stream());
  CHECK(on.get(on.at(1) + 1, 1000) == std::vector<char>(data.begin() + 3, data.begin() + 1003));
  on.device->copy(on.at(1), on.at(0), 0, on.stream());
  on.finish();
}

TEST(device_default_stream_runs_what_it_is_given) {
  OnDevice on(kBytes);
  on.device->copy(on.at(0), on.pinned(), kBytes, nullptr);
  on.finish(nullptr);
  CHECK(on.get(on.at(0), kBytes) == bytes_of(0));
  CHECK(!on.device->is_capturing(nullptr));
  CHECK(!on.device->is_capturing(on.stream()));
}

TEST(device_event_is_reached_after_what_was_before_it) {
  OnDevice on(kBytes);
  const auto event = on.device->make_event();
  CHECK(event->reached());  // nothing was recorded
  auto obstacle = testing::put_obstacle(on.stream());
  event->record(on.stream());
  CHECK(!event->reached());
  obstacle.reset();
  wait_reached(*event, Deadline::after(milliseconds(30000)), nullptr, "the event");
  CHECK(event->reached());
}

TEST(device_event_can_be_recorded_again_and_dropped_early) {
  OnDevice on(kBytes);
  const auto event = on.device->make_event();
  event->record(on.stream());
  on.finish();
  auto obstacle = testing::put_obstacle(on.stream());
  event->record(on.stream());
  CHECK(!event->reached());
  on.device->make_event()->record(on.stream());
  obstacle.reset();
  on.finish();
  CHECK(event->reached());
}

TEST(device_wait_gives_up_in_time_and_looks_around) {
  OnDevice on(kBytes);
  const auto event = on.device->make_event();
  const auto obstacle = testing::put_obstacle(on.stream());
  event->record(on.stream());
  int looks = 0;
  const auto message = CHECK_THROWS(
      TimeoutError, wait_reached(*event, Deadline::after(milliseconds(50)), [&] { ++looks; }, "all_reduce number 7"));
  CHECK_CONTAINS(message, "all_reduce number 7 was not done on the device within 50 ms");
  CHECK(looks <= 50);
  looks = 0;
  const auto end = [&] {
    if (++looks == 3) throw PeerError("rank 3 died");
  };
  const auto began = Clock::now();
  CHECK_THROWS(PeerError, wait_reached(*event, Deadline::after(milliseconds(30000)), end, "it"));
  CHECK(Clock::now() - began < milliseconds(10000));
}

TEST(device_event_makes_one_stream_wait_for_another) {
  OnDevice on(kBytes, 2);
  const auto other = on.device->make_stream();
  const auto first = bytes_of('a'), second = bytes_of('b');
  on.put(on.at(0), first.data(), kBytes);
  std::memcpy(on.pinned(), second.data(), kBytes);
  const auto written = on.device->make_event(), copied = on.device->make_event();
  auto obstacle = testing::put_obstacle(on.stream());
  on.device->copy(on.at(0), on.pinned(), kBytes, on.stream());
  written->record(on.stream());
  written->block(other->handle());
  on.device->copy(on.at(1), on.at(0), kBytes, other->handle());
  copied->record(other->handle());
  CHECK(!copied->reached());
  obstacle.reset();
  wait_reached(*copied, Deadline::after(milliseconds(30000)), nullptr, "the copy");
  CHECK(on.get(on.at(1), kBytes) == second);
}

TEST(device_stream_that_is_dropped_still_does_its_work) {
  OnDevice on(kBytes);
  const auto event = on.device->make_event();
  const auto data = bytes_of('c');
  std::memcpy(on.pinned(), data.data(), kBytes);
  auto other = on.device->make_stream();
  auto obstacle = testing::put_obstacle(other->handle());
  on.device->copy(on.at(0), on.pinned(), kBytes, other->handle());
  event->record(other->handle());
  const auto began = Clock::now();
  other.reset();
  CHECK(Clock::now() - began < milliseconds(10000));
  CHECK(!event->reached());
  obstacle.reset();
  wait_reached(*event, Deadline::after(milliseconds(30000)), nullptr, "the copy");
  CHECK(on.get(on.at(0), kBytes) == data);
}

TEST(device_memory_that_this_process_shared_is_where_it_was) {
  OnDevice on(kBytes, 2);
  const MemoryHandle handle = on.device->share(on.at(1));
  const auto mapped = on.device->map(handle);
  CHECK_EQ(mapped.get(), static_cast<void*>(on.at(1)));
  CHECK(on.device->share(on.at(0)) != handle);
}

TEST(device_says_what_it_cannot_map) {
  MemoryHandle nonsense{};
  nonsense.fill(0x5a);
  CHECK_THROWS(DeviceError, testing::contract_device()->map(nonsense));
}

}  // namespace
}  // namespace ours
