#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/call_record.h"
#include "collectives/group.h"
#include "common/owning_process.h"
#include "device/device.h"

namespace ours {

/// What groups over device memory have in common: a CPU group of the same ranks, the host group, over which they
/// agree. It finds who calls something else, is late or has died, and what fails here fails it, so that peers that wait
/// in it hear of it. Nobody else may use it meanwhile.
///
/// An operation returns when the device has done this rank's part. Where one fails, the device gets a moment to come to
/// an end of what it has been given; if it does not, that may touch the operation's buffers later.
class HostedGroup : public Group {
 public:
  HostedGroup(const HostedGroup&) = delete;
  HostedGroup& operator=(const HostedGroup&) = delete;

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

  /// Where operations do their work on the device: nothing that waits for one may hold these up.
  virtual std::vector<StreamHandle> streams() const = 0;

  /// What is called when an operation has failed, before the device is told to end what is under way, for which it may
  /// have to come to the end of streams that wait for the host. Never throws. Before the first operation.
  void set_on_failure(std::function<void()> call) { on_failure_ = std::move(call); }

 protected:
  HostedGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device);

  void check_usable(const Call& call) override;
  void do_barrier(const Running& run) override { host_->barrier(run.call); }
  void guarded(const Running& run, const std::function<void()>& body) override;

  /// Returns once the device has come to the event; throws the host group's failure. `doing`: "a copy", for messages.
  void wait(DeviceEvent& event, const Running& run, const char* doing);

  /// For at most that long, until the device has done all that it was given here. Returns whether it has.
  virtual bool settle(std::chrono::milliseconds patience) noexcept = 0;
  /// Called once, after the last operation: drops what is shared with peers. Whether the device has settled.
  virtual void let_go(bool settled) noexcept = 0;

  /// What the destructor of each kind calls first.
  void end() noexcept;

  bool in_child() const;
  Group& host() const { return *host_; }
  Device& device() const { return *device_; }

 private:
  void check_not_left() const;
  /// Runs `body`, whose InvalidArgument is a DeviceError: peers may have begun.
  void run_past_misuse(const Call& call, const std::function<void()>& body) const;
  void let_go_if_left() noexcept;

  const std::shared_ptr<Group> host_;
  const std::shared_ptr<Device> device_;
  const OwningProcess owner_;
  std::function<void()> on_failure_;
  std::atomic<bool> left_{false};
  std::mutex busy_;          ///< held while an operation is under way
  bool settled_ = true;      ///< guarded by busy_
  bool has_let_go_ = false;  ///< guarded by busy_
};

/// Waits for at most that long; false where the device has failed or takes longer.
bool settles(DeviceEvent& event, std::chrono::milliseconds patience) noexcept;

}  // namespace ours
