#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "backend/collective_work.h"
#include "backend/comm_queue.h"
#include "backend/device/device_context.h"
#include "backend/device/device_transfers.h"
#include "backend/group_status.h"
#include "backend/joining/rendezvous.h"
#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"
#include "common/deadline.h"

namespace ours {

/// Connections between the ranks of a process group, and what uses them in one order: a queue of collectives, and the
/// messages. A group has a lane for what the program calls, and others for what callbacks start (callback_lanes.h).
///
/// The parts are shared, since Works, threads and memory may outlive the lane.
class Lane {
 public:
  /// Brings the ranks together. Throws DistBackendError if they have not come within `meeting.timeout`.
  static std::shared_ptr<Lane> open(const Meeting& meeting, std::shared_ptr<GroupStatus> status);
  /// Does what close() does. In a forked child, where everything belongs to the parent and its threads do not exist,
  /// the parts are leaked instead; their memory goes with the process.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Numbers a collective, tells those who record it, and runs or queues it. `callback`: the callback that starts it,
  /// or null.
  c10::intrusive_ptr<CollectiveWork> start(Collective collective, const GroupNames& names, const Callback* callback);
  /// Takes the number of a call that has no meaning here, so that the other ranks hear of it instead of waiting for
  /// this one.
  void refuse(Op op, const std::string& why, const Callback* callback);
  /// Starts a send or a receive, and gives it its number. It is posted at once, whatever else is under way, so that no
  /// order of posting can deadlock.
  c10::intrusive_ptr<OursWork> post(TransferRequest request, const GroupNames& names);
  /// Makes what collectives of tensors on `device` need, unless it is there.
  void connect_device(at::Device device, std::chrono::milliseconds timeout, const GroupNames& names,
                      const Callback* callback);

  /// Ends all operations under way with an error, here and on the peers.
  void abort(const std::string& reason) const;
  /// Leaves the group and lets its threads end, without waiting for them or for peers. Operations under way fail.
  void close() const noexcept;
  /// Called after close(): waits a while for callbacks that still run.
  void wait_closed() const noexcept;

  /// Closes all lanes that still exist, and waits a while for operations on devices and for callbacks. Called when the
  /// program ends: a thread that wants the GIL after Python has ended could only hang or abort.
  static void close_all() noexcept;

  const std::shared_ptr<GroupStatus> status;
  const std::shared_ptr<CommQueue> queue;
  const std::shared_ptr<Group> group;
  const std::shared_ptr<PointToPoint> messages;
  const std::shared_ptr<DeviceContext> devices;
  const std::shared_ptr<DeviceTransfers> transfers;

 private:
  Lane(std::shared_ptr<GroupStatus> status, std::shared_ptr<Group> group, std::shared_ptr<PointToPoint> messages);

  uint64_t next_number(const Callback* callback) const;
  /// The device's part of such a collective.
  std::unique_ptr<DeviceCall> device_call(const Collective& collective, const Call& call) const;
  /// If the group has used tensors on devices and has not failed, waits until `deadline` for what is under way. With
  /// devices, wait() returns before an operation has ended, and a program may rightly end then.
  void drain(Deadline deadline) const noexcept;

  std::atomic<uint64_t> transfer_count_{0};
};

}  // namespace ours
