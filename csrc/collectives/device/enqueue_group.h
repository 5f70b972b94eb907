#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/device/device_group_base.h"
#include "collectives/device/device_opening.h"

namespace ours {

/// A group whose operations the device does by itself once it has been given them, such as those of NCCL.
///
/// Called as any Group, it compares first what the ranks call, and returns when the device is done. With enqueue() and
/// watch() the comparison comes afterwards: enqueue() only gives the device its work, on the caller's thread, and
/// watch(), on another one, finds ranks that called something else, are late or have died, and stops the work of those
/// that wait for them. So what an operation does may only depend on arguments that have to be the same on all ranks.
class EnqueueGroup : public DeviceGroupBase {
 public:
  /// What a rank calls: what is compared with its peers' calls.
  struct Claim {
    CallRecord record;
    uint64_t fingerprint;  ///< as in Running
    Words sizes;           ///< table_of() a plan, or nothing
  };

  /// What the device was given, for watch().
  struct Enqueued {
    std::vector<Claim> claims;          ///< one for each operation
    std::shared_ptr<DeviceEvent> done;  ///< behind all of it
  };

  /// Gives stream() what `body` calls of this group, behind what the stream `after` has been given so far. Waits for
  /// neither device nor peers. Calls must come in the same order on all ranks. Throws InvalidArgument where nothing was
  /// given; any other error fails the group.
  Enqueued enqueue(const Call& call, StreamHandle after, const std::function<void()>& body);

  /// Returns when the device has done what enqueue() gave it; throws as an operation of a Group. In the order of
  /// enqueue(), and one at a time, since it uses the host group. `call` has the number by which the ranks compare.
  void watch(const Call& call, const Enqueued& enqueued);

  /// Where operations run.
  StreamHandle stream() const { return stream_; }
  std::vector<StreamHandle> streams() const override { return {stream_}; }

 protected:
  EnqueueGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device);

  void guarded(const Running& run, const std::function<void()>& body) override;

  /// Every operation calls this before it gives stream() its work: compares with the peers what all ranks called, now
  /// or in watch(). Throws MismatchError.
  void claim(const Running& run, Words sizes = {});

  /// Throws where what does the work has failed. Called now and then while an operation is under way.
  virtual void check_engine() {}

  /// Keeps the stream for ever: something that cannot be ended uses it.
  void leave_stream_behind() noexcept;

 private:
  void compare(const Call& call, const Claim& claim) const;
  void await(const Call& call, DeviceEvent& done, const std::function<void()>& check_engine) const;

  std::shared_ptr<DeviceStream> own_stream_;
  const StreamHandle stream_;
  const std::unique_ptr<DeviceEvent> before_;
  Enqueued* enqueued_ = nullptr;  ///< within enqueue()
};

}  // namespace ours
