#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace ours {

/// Lets go of tensors of a device, on a thread of its own, which starts with the first of them. To free one takes a
/// lock of torch's, which somebody may hold while he waits for the device, and so for a stream that a collective holds:
/// the thread that is to end that collective must not wait for the lock.
class Disposal : public std::enable_shared_from_this<Disposal> {
 public:
  /// Drops what `what` owns, in the order of calls; calls nothing. Never waits, but where there can be no thread.
  void drop(std::function<void()> what) noexcept;

  /// Lets the thread end when nothing is left. Later drops start it again for a moment.
  void close() noexcept;
  /// Waits until the thread has ended or waits for more, at most for `limit`, and not at all on that thread.
  void wait_idle(std::chrono::milliseconds limit);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void run();

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<std::function<void()>> dropped_;
  bool running_ = false;  // the thread is there
  bool busy_ = false;     // and lets go of something
  bool closed_ = false;
};

}  // namespace ours
