#include <algorithm>
#include <chrono>
#include <thread>

#include "device/device.h"

namespace ours {
namespace {

using std::chrono::microseconds;

// A wait shorter than this does not sleep: the system needs about as long to wake a thread.
constexpr microseconds kYield{50};
// A sleep takes up to 50 us longer than asked for (the system's timer slack); with this limit nothing is noticed 200
// us late.
constexpr microseconds kLongestNap{100};
constexpr microseconds kLook{1000};

/// Short after a short wait, so that the end is noticed soon relative to the whole wait.
Clock::duration nap_after(Clock::duration waited) { return std::min<Clock::duration>(waited / 8, kLongestNap); }

}  // namespace

void wait_reached(DeviceEvent& event, Deadline deadline, const std::function<void()>& look_around,
                  const std::string& what) {
  const Clock::time_point began = Clock::now();
  Clock::time_point looked = began;
  while (!event.reached()) {
    const Clock::time_point now = Clock::now();
    if (now - looked >= kLook) {
      looked = now;
      if (look_around) look_around();
    }
    if (now >= deadline.at()) {
      throw TimeoutError(what + " was not done on the device within " + std::to_string(deadline.timeout().count()) +
                         " ms: it waits for other ranks, or for work given to the device before it. Raise the timeout "
                         "if that may take longer");
    }
    if (now - began < kYield) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_until(std::min(now + nap_after(now - began), deadline.at()));
    }
  }
}

}  // namespace ours
