#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace ours {

/// Gives a stream that is held more than it takes, on a thread of its own, which has to wait then.
class StreamFiller {
 public:
  /// Calls `give` so often, or until this is destroyed. Throws std::system_error where there can be no more threads.
  StreamFiller(int times, std::function<void()> give);
  ~StreamFiller();
  StreamFiller(const StreamFiller&) = delete;
  StreamFiller& operator=(const StreamFiller&) = delete;

  /// Returns when all is given, or when nothing has been for that long, or after three times that.
  void wait_until_it_stands(std::chrono::milliseconds patience);

  /// How often it has.
  int given() const;

  /// Gives nothing more. Waits for at most that long until the call that is under way has returned; whether it has.
  /// Throws what a call has thrown.
  bool stop(std::chrono::milliseconds patience);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace ours
