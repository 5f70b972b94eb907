#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/device/device_group_base.h"
#include "collectives/device/device_opening.h"

namespace ours {

/// A group whose operations run on the device by themselves once they have been given to it, such as those of NCCL.
///
/// An ordinary call first compares what the ranks call, and returns when the device is done. With enqueue() and
/// watch() the comparison comes afterwards: enqueue() only gives the device its work, on the caller's thread;
/// watch(), on another thread, finds ranks that called something else, are late or have died, and stops the work that
/// waits for them. Therefore what an operation does may depend only on arguments that must be the same on all ranks.
class EnqueueGroup : public DeviceGroupBase {
 public:
  /// The part of a rank's call that is compared with its peers' calls.
  struct Claim {
    CallRecord record;
    uint64_t fingerprint;  ///< as in Running
    Words sizes;           ///< table_of() a plan, or nothing
  };

  /// The work given to the device, for watch().
  struct Enqueued {
    std::vector<Claim> claims;          ///< one for each operation
    std::shared_ptr<DeviceEvent> done;  ///< behind all of it
  };

  /// Gives stream() the calls that `body` makes of this group, after the work that the stream `after` has been given
  /// so far. Waits for neither device nor peers. Calls must come in the same order on all ranks. Throws
  /// InvalidArgument if nothing was given to the device; any other error fails the group.
  Enqueued enqueue(const Call& call, StreamHandle after, const std::function<void()>& body);

  /// Returns when the device has done the work of one enqueue(); throws like an operation of a Group. Must be called
  /// in the order of the enqueue() calls and one at a time, since it uses the host group. `call` has the number by
  /// which the ranks compare.
  void watch(const Call& call, const Enqueued& enqueued);

  /// The stream in which operations run.
  StreamHandle stream() const { return own_stream_->handle(); }
  std::vector<StreamHandle> streams() const override { return {stream()}; }

 protected:
  EnqueueGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device);

  void guarded(const Running& run, const std::function<void()>& body) override;

  /// Every operation calls this before it gives stream() its work. Compares with the peers what all ranks called,
  /// either now or in watch(). Throws MismatchError.
  void claim(const Running& run, Words sizes = {});

  /// Throws if the library that does the work has failed. Called now and then until an operation is done, maybe while
  /// another thread begins one.
  virtual void check_engine() {}

  /// Keeps the stream, for what may outlive the group.
  std::shared_ptr<DeviceStream> own_stream() const { return own_stream_; }

  /// Whether any work was captured into a graph, which may run at any time as long as it exists.
  bool was_captured() const { return captured_; }

 private:
  void compare(const Call& call, const Claim& claim) const;
  void await(const Call& call, DeviceEvent& done);

  const std::shared_ptr<DeviceStream> own_stream_;
  const std::unique_ptr<DeviceEvent> before_;
  Enqueued* enqueued_ = nullptr;  ///< within enqueue()
  bool captured_ = false;         ///< as enqueued_, guarded by the lock of guarded()
};

}  // namespace ours
