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

  /// Ends all operations under way with an error, here and on the peers.
  void abort(const std::string& reason) const;

  /// If the group has used tensors on devices and has not failed, waits until `deadline` for what is under way. With
  /// devices, wait() returns before an operation has ended, and a program may rightly end then.
  void drain(Deadline deadline) const noexcept;

  /// Leaves the group and lets its threads end, without waiting for them or for peers. Operations under way fail.
  void close() const noexcept;

  /// Called after close(): waits a while for callbacks that still run.
  void wait_closed() const noexcept;

  /// For a forked child, where everything belongs to the parent and its threads do not exist: leaks the parts instead
  /// of destroying them. The memory goes with the process.
  void abandon();
};

/// All process groups of this process, so that they can be closed when the program ends: a thread that wants the GIL
/// after Python has ended could only hang or abort.
class GroupRegistry {
 public:
  static GroupRegistry& instance();

  void add(const GroupParts& parts);

  /// Closes the groups that still exist, and waits a while for operations on devices and for callbacks.
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
  std::vector<Entry> entries_;  // guarded by mutex_; add() drops those whose status is gone
};

}  // namespace ours
