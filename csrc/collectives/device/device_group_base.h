#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives/group.h"
#include "common/owning_process.h"
#include "device/deferred_release.h"

namespace ours {

/// The common base of groups over device memory. Each is made over a CPU group of the same ranks, its host group, in
/// which the ranks agree. The host group finds a rank that calls something else, is late or has died. A failure on
/// the device fails the host group, so that peers that wait in it learn of the failure. Nothing else may use the host
/// group meanwhile.
///
/// An operation returns when the device has done this rank's part. After a failure, the device may touch the
/// operation's buffers until it has finished the work already given to streams().
class DeviceGroupBase : public Group {
 public:
  DeviceGroupBase(const DeviceGroupBase&) = delete;
  DeviceGroupBase& operator=(const DeviceGroupBase&) = delete;

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  void monitored_barrier(const Call& call, bool wait_all_ranks) override {
    host_->monitored_barrier(call, wait_all_ranks);
  }
  void abort(const std::string& reason) override { host_->abort(reason); }
  void fail(const std::exception_ptr& error) noexcept override { host_->fail(error); }
  void refuse(const Call& call, const std::string& why) noexcept override { host_->refuse(call, why); }
  void leave() noexcept override;
  std::vector<int> node_sizes() const override { return host_->node_sizes(); }
  std::string failure() const override { return host_->failure(); }

  /// The streams in which operations do their work on the device.
  virtual std::vector<StreamHandle> streams() const = 0;

 protected:
  DeviceGroupBase(std::shared_ptr<Group> host, std::shared_ptr<Device> device);

  void check_usable(const Call& call) override;
  void do_barrier(const Running& run) override { host_->barrier(run.call); }
  void guarded(const Running& run, const std::function<void()>& body) override;

  /// Called in the handler of an error that an operation threw: makes the error the group's failure, and stops what
  /// is under way.
  void fail_operation() noexcept;

  /// Returns once the device has come to the event; throws the host group's failure. `doing`: "a copy", for messages.
  void wait(DeviceEvent& event, const Running& run, const char* doing);

  /// Throws the failure of the group, if there is one.
  void check_peers(const Call& call) const;

  /// Called when the group has failed and the peers have been told: ends what waits for peers on the device, and what
  /// a thread is stuck in. Called by several threads at a time, also while an operation is under way.
  virtual void stop_device_work() noexcept {}
  /// Called once, after the last operation, to release() what the device or peers may still touch. Not in a forked
  /// child, which shares nothing with them.
  virtual void let_go() noexcept {}
  /// In let_go(): destroys `owned` once the device has done what streams() have been given.
  void release(std::shared_ptr<void> owned) noexcept {
    if (!settled_) release_after(device(), streams(), std::move(owned));
  }

  /// The destructor of each kind calls this first.
  void end() noexcept;

  bool in_child() const { return !owner_.is_here(); }
  Group& host() const { return *host_; }
  Device& device() const { return *device_; }

 private:
  void check_not_left() const;
  /// Runs `body` and turns its InvalidArgument into a DeviceError, since peers may have begun.
  void run_past_misuse(const Call& call, const std::function<void()>& body) const;
  /// Gives the device a moment to finish the work it was given; returns whether it has.
  bool settle() noexcept;
  void let_go_if_left() noexcept;

  const std::shared_ptr<Group> host_;
  const std::shared_ptr<Device> device_;
  const OwningProcess owner_;
  std::atomic<bool> left_{false};
  /// Held while an operation is under way. Recursive, since a signal handler that runs in one may end the group.
  std::recursive_mutex busy_;
  bool settled_ = false;     ///< at the last look; guarded by busy_
  bool has_let_go_ = false;  ///< guarded by busy_
};

}  // namespace ours
