#include "device/hold_check.h"

#include <atomic>
#include <chrono>
#include <memory>

#include "support/stand_in_device.h"
#include "support/testing.h"

namespace ours {
namespace {

using testing::StandInDevice;
using Answer = HoldCheck::Answer;

// What goes on has time also on a busy machine; what stands shall not take that long.
constexpr std::chrono::milliseconds kLong{10000};
constexpr std::chrono::milliseconds kShort{300};

TEST(hold_check_asks_the_device_once_for_a_stream_that_may_be_held) {
  const auto device = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream(), more = device->make_stream();
  HoldCheck check(device, kLong);
  check.need({ours->handle()});
  for (int i = 0; i < 3; ++i) CHECK(check.may_hold(theirs->handle()) == Answer::Yes);
  CHECK_EQ(device->counts().gate_holds, 1);
  // Copies there and back, and a kernel, in both streams: they may have queues each.
  CHECK_EQ(device->counts().copies, 4);
  CHECK_EQ(device->counts().flattens, 2);
  // Another stream is another question, and so is the same one where more have to go on.
  CHECK(check.may_hold(nullptr) == Answer::Yes);
  CHECK_EQ(device->counts().gate_holds, 2);
  check.need({more->handle()});
  for (int i = 0; i < 3; ++i) CHECK(check.may_hold(nullptr) == Answer::Yes);
  CHECK_EQ(device->counts().gate_holds, 3);
  check.release({more->handle()});
  CHECK(check.may_hold(nullptr) == Answer::Yes);
  CHECK_EQ(device->counts().gate_holds, 3);
  device->synchronize(theirs->handle());  // nothing is held
}

TEST(hold_check_is_one_for_all_who_use_the_device) {
  const auto device = StandInDevice::make({0, "a", true, 1}), other = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream();
  const auto check = HoldCheck::of(device);
  CHECK(check == HoldCheck::of(device));
  CHECK(check != HoldCheck::of(other));
  // What another group needs counts.
  CHECK(check->may_hold(theirs->handle()) == Answer::Yes);
  HoldCheck::of(device)->need({ours->handle()});
  CHECK(check->may_hold(theirs->handle()) == Answer::NotNow);
}

/// Asks until there is an answer, and returns how often. What comes late, as on a busy machine, is no attempt.
int ask_until_it_is(Answer wanted, HoldCheck& check, StreamHandle held, StandInDevice& device, StreamHandle needed) {
  Answer answer = Answer::NotNow;
  int asked = 0;
  for (; answer == Answer::NotNow && asked < 20; ++asked) {
    answer = check.may_hold(held);
    device.synchronize(needed);
  }
  CHECK(answer == wanted);
  device.synchronize(held);  // nothing is held
  return asked;
}

TEST(hold_check_finds_streams_that_share_a_queue) {
  const auto device = StandInDevice::make({0, "a", true, 1});
  const auto theirs = device->make_stream(), ours = device->make_stream();
  HoldCheck check(device, kShort);
  check.need({ours->handle()});
  CHECK(ask_until_it_is(Answer::Never, check, theirs->handle(), *device, ours->handle()) >= HoldCheck::kAttempts);
  const int holds = device->counts().gate_holds;
  CHECK(check.may_hold(theirs->handle()) == Answer::Never);
  CHECK_EQ(device->counts().gate_holds, holds);
}

std::shared_ptr<StandInDevice> device_with_short_streams(bool full_stream_stops_all, int queues = 0) {
  testing::StandInOptions options;
  options.queues = queues;
  options.most_in_a_stream = 50;
  options.full_stream_stops_all = full_stream_stops_all;
  return StandInDevice::make(options);
}

TEST(hold_check_finds_that_nobody_gets_on_where_a_stream_that_is_held_is_full) {
  const auto device = device_with_short_streams(true);
  const auto theirs = device->make_stream(), others = device->make_stream(), ours = device->make_stream();
  HoldCheck check(device, kShort / 3);
  check.need({ours->handle()});
  CHECK(ask_until_it_is(Answer::Never, check, theirs->handle(), *device, ours->handle()) >= HoldCheck::kAttempts);
  // It is so for all streams.
  CHECK(check.may_hold(others->handle()) == Answer::Never);
}

TEST(hold_check_lets_a_full_stream_be_held_where_others_get_on) {
  const auto device = device_with_short_streams(false);
  const auto theirs = device->make_stream(), others = device->make_stream(), ours = device->make_stream();
  HoldCheck check(device, kShort);
  check.need({ours->handle()});
  // That theirs has something to do is nothing to wait for.
  const auto busy = device->stop(theirs->handle());
  Answer answer = Answer::NotNow;
  for (int i = 0; i < 20 && answer == Answer::NotNow; ++i) answer = check.may_hold(theirs->handle());
  CHECK(answer == Answer::Yes);
  busy->open();
  device->synchronize(theirs->handle());
  CHECK(device->counts().flattens > 50);
  // It is tried once.
  const int flattens = device->counts().flattens;
  ask_until_it_is(Answer::Yes, check, others->handle(), *device, ours->handle());
  CHECK(device->counts().flattens < flattens + 50);
}

TEST(hold_check_takes_another_stream_to_fill_where_one_shares_a_queue) {
  const auto device = device_with_short_streams(false, 3);
  const auto theirs = device->make_stream(), ours = device->make_stream(), more = device->make_stream();
  const auto again = device->make_stream();  // the next one has the queue of ours
  HoldCheck check(device, kShort / 3);
  check.need({ours->handle()});
  ask_until_it_is(Answer::Yes, check, theirs->handle(), *device, ours->handle());
}

TEST(hold_check_lets_go_where_the_device_fails_while_it_fills_a_stream) {
  const auto device = device_with_short_streams(false);
  const auto theirs = device->make_stream(), ours = device->make_stream();
  std::atomic<int> calls{0};
  {
    HoldCheck check(device, kLong);
    check.need({ours->handle()});
    device->before("flatten", [&] {
      if (++calls > 20) throw DeviceError("no such thing");
    });
    CHECK_THROWS(DeviceError, check.may_hold(theirs->handle()));
  }
  CHECK(calls > 20);
  device->synchronize(theirs->handle());
  device->synchronize(ours->handle());
}

TEST(hold_check_tries_again_as_long_as_streams_are_busy) {
  const auto device = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream();
  HoldCheck check(device, kShort);
  check.need({ours->handle()});
  const auto busy = device->stop(ours->handle());
  for (int i = 0; i <= HoldCheck::kAttempts; ++i) CHECK(check.may_hold(theirs->handle()) == Answer::NotNow);
  busy->open();
  device->synchronize(ours->handle());
  // All attempts are left. On a busy machine some of what is asked counts for nothing.
  Answer answer = Answer::NotNow;
  for (int i = 0; i < 20 && answer == Answer::NotNow; ++i) answer = check.may_hold(theirs->handle());
  CHECK(answer == Answer::Yes);
}

TEST(hold_check_knows_nothing_of_a_stream_where_the_device_fails) {
  const auto device = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream();
  HoldCheck check(device, kLong);
  check.need({ours->handle()});
  for (int i = 0; i <= HoldCheck::kAttempts; ++i) {
    device->fail_next_call("no such thing");
    CHECK_THROWS(DeviceError, check.may_hold(theirs->handle()));
  }
  CHECK(check.may_hold(theirs->handle()) == Answer::Yes);
}

TEST(hold_check_lets_go_where_the_device_fails_while_it_holds) {
  const auto device = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream();
  device->slow_down(2 * kShort);
  {
    HoldCheck check(device, kLong);
    check.need({ours->handle()});
    device->before("flatten", [] { throw DeviceError("no such thing"); });
    CHECK_THROWS(DeviceError, check.may_hold(theirs->handle()));
  }
  // Copies that were given before it failed end, in memory that is still there.
  device->synchronize(theirs->handle());
  device->synchronize(ours->handle());
}

TEST(hold_check_lets_go_where_a_call_to_the_device_waits_for_the_stream_that_it_holds) {
  const auto device = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream();
  HoldCheck check(device, kShort);
  check.need({ours->handle()});
  device->before("copy", [&] { device->synchronize(theirs->handle()); });
  CHECK(check.may_hold(theirs->handle()) == Answer::NotNow);
}

TEST(hold_check_keeps_what_the_device_may_still_write) {
  const auto device = StandInDevice::make();
  const auto theirs = device->make_stream(), ours = device->make_stream();
  device->slow_down(2 * kShort);
  {
    HoldCheck check(device, kShort);
    check.need({ours->handle()});
    CHECK(check.may_hold(theirs->handle()) == Answer::NotNow);
  }
  device->synchronize(ours->handle());  // a copy into memory that is gone would end the process
}

}  // namespace
}  // namespace ours
