#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/comm_queue.h"
#include "backend/group_status.h"
#include "collectives/group.h"
#include "collectives/point_to_point.h"

namespace ours {

/// The parts of a process group that run or hold something, and how they end.
struct GroupParts {
  std::shared_ptr<GroupStatus> status;
  std::shared_ptr<CommQueue> queue;
  std::shared_ptr<Group> group;
  std::shared_ptr<PointToPoint> messages;

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

  /// Closes the groups that there still are, and waits a while for their callbacks.
  void close_all() noexcept;

 private:
  struct Entry {
    std::weak_ptr<GroupStatus> status;
    std::weak_ptr<CommQueue> queue;
    std::weak_ptr<Group> group;
    std::weak_ptr<PointToPoint> messages;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;  // guarded by mutex_; those whose status is gone are dropped by the next add()
};

}  // namespace ours
