#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/device/device_transfer_work.h"

namespace ours {

/// The thread on which the sends and receives of device tensors of a group wait for the device. It starts with the
/// first of them. None holds up another, but sends to one rank with one tag go out in the order of calls. There is no
/// order between these and the messages of CPU tensors.
class DeviceTransfers : public std::enable_shared_from_this<DeviceTransfers> {
 public:
  using WorkPtr = c10::intrusive_ptr<DeviceTransferWork>;

  /// `messages`: those of the group.
  explicit DeviceTransfers(std::shared_ptr<PointToPoint> messages) : messages_(std::move(messages)) {}

  /// Calls go_on() of `work` when the device has copied, or has failed to. Sends are added in the order of calls. Never
  /// blocks. Throws std::system_error if no thread can be started.
  void add(WorkPtr work);

  /// Runs callbacks of these on another thread, since they may wait for more of these.
  void call(TransferCallbacks callbacks) { messages_->call(std::move(callbacks)); }

  /// The thread ends when nothing is left, which is soon in a group that is closed.
  void close() noexcept;
  /// After close(): waits at most `limit` until the thread has ended, and not at all on that thread.
  void wait_closed(std::chrono::milliseconds limit);

 private:
  void run();
  /// Takes what was added, after waiting for a while, or for as long as there is nothing else. Returns false if the
  /// thread is to end.
  bool take_added(std::list<WorkPtr>& copying);

  const std::shared_ptr<PointToPoint> messages_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::list<WorkPtr> added_;
  std::thread::id thread_;
  bool running_ = false;
  bool closed_ = false;
};

}  // namespace ours
