#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/comm_queue.h"
#include "backend/device/device_context.h"
#include "backend/device/device_transfer.h"
#include "backend/group_status.h"
#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"
#include "common/deadline.h"

namespace ours {

/// The parts of a process group that run or hold something, and how they end.
struct GroupParts {
  std::shared_ptr<GroupStatus> status;
  std::shared_ptr<CommQueue> queue;
  std::shared_ptr<Group> group;
  std::shared_ptr<PointToPoint> messages;
  std::shared_ptr<DeviceContext> devices;
  std::shared_ptr<DeviceTransfers> transfers;

  /// Ends everything under way with an error, here and on the peers.
  void abort(const std::string& reason) const;

  /// Of a group with tensors of devices that has not failed: waits for what is under way until `deadline`. There wait()
  /// returns before an operation has ended, and the program is right to end then.
  void drain(Deadline deadline) const noexcept;

  /// Leaves the group and lets its threads end, without waiting for anyone. What is under way fails.
  void close() const noexcept;

  /// After close(): waits a while for the callbacks that still run.
  void wait_closed() const noexcept;

  /// In a forked child everything belongs to the parent, and its threads do not exist: gives up the parts without
  /// ending them. The memory goes with the process.
  void abandon();
};

/// All process groups of this process, for the end of the program: threads that want the GIL after Python has gone
/// could only hang or abort.
class GroupRegistry {
 public:
  static GroupRegistry& instance();

  void add(const GroupParts& parts);

  /// Closes the groups that there still are, and waits a while for what devices have under way, and for callbacks.
  void close_all() noexcept;

 private:
  struct Entry {
    std::weak_ptr<GroupStatus> status;
    std::weak_ptr<CommQueue> queue;
    std::weak_ptr<Group> group;
    std::weak_ptr<PointToPoint> messages;
    std::weak_ptr<DeviceContext> devices;
    std::weak_ptr<DeviceTransfers> transfers;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;  // guarded by mutex_; those whose status is gone are dropped by the next add()
};

}  // namespace ours
