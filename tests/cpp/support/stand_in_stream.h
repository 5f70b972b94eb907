#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "device/device.h"

namespace ours::testing {

/// The state that a stand-in device shares with its streams and events.
class StandInState {
 public:
  /// Throws DeviceError if the device has failed, and runs what before() has set for `call`.
  void check(const char* call);
  /// Runs what before() has set for `call`.
  void pause(const char* call);
  void before(std::string call, std::function<void()> what);
  void fail(std::string why);
  void check_alive();

 private:
  std::mutex mutex_;
  std::string failure_, call_;
  std::function<void()> before_call_;
};

/// A thread that does one thing after the other.
class StandInQueue {
 public:
  explicit StandInQueue(std::shared_ptr<StandInState> state);
  ~StandInQueue();

  void push(std::function<void()> work);
  bool idle();

 private:
  void run();

  std::shared_ptr<StandInState> state_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false, ending_ = false;
  std::thread thread_;
};

/// Something that happens once and for which the queues wait.
class StandInPoint {
 public:
  void reach();
  bool reached();
  void wait();
  /// Whether a queue has come to wait for it.
  bool awaited();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false, awaited_ = false;
};

}  // namespace ours::testing
