#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collectives/device/device_group.h"
#include "collectives/group.h"
#include "device/device_library.h"

namespace ours {

/// What a process group has for the tensors of a device: the device itself, and the Group that works in its memory,
/// which is made before the first collective that needs it. There is one device a group and rank.
class DeviceContext {
 public:
  /// `host`: the same ranks' group over CPU memory.
  explicit DeviceContext(std::shared_ptr<Group> host) : host_(std::move(host)) {}
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  /// The device that use() has chosen, if it was called.
  std::optional<at::Device> device() const;

  /// Takes that device for the group. Throws ValueError where it has another one already, DeviceError where there can
  /// be none. Callable from any thread.
  void use(at::Device device);

  // ---- after use()
  Device& accelerator() const { return *accelerator_; }
  /// The stream that is torch's current one on the calling thread.
  StreamHandle current_stream() const;
  /// A stream of the group's own, which no user of torch can come by: for what a collective has torch do.
  StreamHandle own_stream() const { return stream_->handle(); }
  /// A stream of the device in torch's terms.
  c10::Stream torch_stream(StreamHandle stream) const;
  /// The stream of the copies of sends and receives.
  StreamHandle transfer_stream() const { return transfer_stream_->handle(); }

  /// Makes the Group for the device's memory, unless it is there; at the same place in the order of collectives on all
  /// ranks.
  void make_group(const Call& call);

  /// That, or null where it has not been made yet. Callable from any thread.
  std::shared_ptr<Group> made_group() const;

  /// Held from when a collective is given to the device until it has its place in the queue, so that the order there is
  /// that of the device. Recursive, since the queue may run hooks at once, which start more.
  std::recursive_mutex& order() { return order_; }

  /// "ipc: the ranks share devices": what moves the data, and why that; empty until make_group() was called.
  std::string engine() const;

  /// Keeps what a collective that has failed owns until the device has done what it was given by then.
  void release_after_failure(std::shared_ptr<void> owned) const noexcept;

  /// The CPU group, whose failures are the device's as well.
  Group& host() const { return *host_; }

  /// Throws the failure that ended the group, if there is one.
  void check_alive(const Call& call) const;

  // As the Group's, of the one that was made.
  void abort(const std::string& reason) const;
  void leave() const noexcept;

 private:
  const std::shared_ptr<Group> host_;
  std::recursive_mutex order_;
  mutable std::mutex mutex_;
  std::optional<at::Device> device_;  // guarded by mutex_; once set, it stays
  DeviceLibrary* library_ = nullptr;  // set with device_, as those below
  std::shared_ptr<Device> accelerator_;
  std::shared_ptr<DeviceStream> stream_;
  std::shared_ptr<DeviceStream> transfer_stream_;
  MadeDeviceGroup made_;  // guarded by mutex_; once there, its group stays
};

}  // namespace ours
