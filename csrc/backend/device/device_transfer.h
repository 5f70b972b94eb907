#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/device/device_transfer_work.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// The sends and receives of device tensors of one group, through pinned memory and the messages of the CPU. A thread
/// of its own, which starts with the first of them, moves each one on when the device or the peer is ready. It waits
/// for none, so no message holds up another; only sends to the same rank with the same tag go one after the other.
/// There is no order between these transfers and those of CPU tensors.
class DeviceTransfers : public std::enable_shared_from_this<DeviceTransfers> {
 public:
  using WorkPtr = c10::intrusive_ptr<DeviceTransferWork>;

  DeviceTransfers(std::shared_ptr<DeviceContext> context, const std::shared_ptr<PointToPoint>& messages,
                  std::shared_ptr<GroupStatus> status)
      : context_(std::move(context)), messages_(messages), status_(std::move(status)) {}

  /// Makes the Work of a transfer, which is not yet under way. Throws if the device cannot take part.
  WorkPtr make(const TransferRequest& request, int rank);
  /// Never blocks. Errors belong to the Work, except misuse (ValueError), which is thrown.
  void start(const WorkPtr& work);

  /// Whether anything posted has not ended.
  bool busy() const;

  /// Ends the transfers that the device has not reached yet with an error; those whose message is under way end with
  /// the messages. The thread ends when nothing is left.
  void close() noexcept;
  /// After close(): waits at most `limit` until the thread has ended, and not at all on that thread.
  void wait_closed(std::chrono::milliseconds limit);

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// What a transfer waits for. Sends: Device, Copy, Message; receives: Message, Device, Copy.
  enum class Stage {
    Device,   ///< for the device to come to its place in the stream
    Copy,     ///< for the device to copy from, or to, pinned memory
    Message,  ///< for the message to arrive there, or to leave
  };

  struct Item {
    WorkPtr work;
    std::shared_ptr<void> pinned;
    Stage stage;
    std::unique_ptr<DeviceEvent> copied;  // in Stage::Copy
    std::exception_ptr error;             // once it has failed
    bool message_ended = false;           // guarded by mutex_
  };
  using ItemPtr = std::shared_ptr<Item>;

  void run();
  /// Moves all on as far as they go without waiting; returns those that have ended.
  std::vector<ItemPtr> advance_all();
  /// Returns whether it has ended. Throws if it has failed.
  bool advance(const ItemPtr& item);
  /// Whether the device has come to the place of `item`. Throws if it may not go on.
  bool may_start(const Item& item);
  bool is_first_to_send(const Item& item) const;
  void copy(Item& item);
  void post(const ItemPtr& item);
  TransferDone on_end(const ItemPtr& item);
  void end(const ItemPtr& item) noexcept;

  std::shared_ptr<void> take_pinned(size_t bytes);
  void give_back(size_t bytes, std::shared_ptr<void> pinned);

  const std::shared_ptr<DeviceContext> context_;
  const std::weak_ptr<PointToPoint> messages_;  // weak: the last owner must not be a thread of its own
  const std::shared_ptr<GroupStatus> status_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::list<ItemPtr> items_;                                     // in the order posted
  std::map<size_t, std::vector<std::shared_ptr<void>>> pinned_;  // free blocks, by size
  size_t pinned_bytes_ = 0;                                      // total size of these
  std::thread::id thread_;
  bool running_ = false;
  bool closed_ = false;
};

}  // namespace ours
