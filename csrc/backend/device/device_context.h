#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collectives/device/device_group.h"
#include "collectives/device/enqueue_group.h"
#include "collectives/group.h"
#include "device/device_library.h"

namespace ours {

/// A process group's state for the tensors of a device: the device itself, and the Group that works in its memory,
/// which is made before the first collective that needs it. A group has one device on each rank.
class DeviceContext {
 public:
  /// `host`: the same ranks' group over CPU memory.
  explicit DeviceContext(std::shared_ptr<Group> host) : host_(std::move(host)) {}
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  /// The device that use() has chosen, if it was called.
  std::optional<at::Device> device() const;

  /// Takes that device for the group. Throws ValueError if the group already has another one, DeviceError if it
  /// cannot have one. Callable from any thread.
  void use(at::Device device);

  // ---- after use()
  Device& accelerator() const { return *accelerator_; }
  /// The stream that is torch's current one on the calling thread.
  StreamHandle current_stream() const;
  /// Whether that is being captured into a graph. Callable before use().
  bool is_capturing() const { return device() && accelerator_->is_capturing(current_stream()); }
  /// A stream of the group's own, which torch never gives to its users: for what a collective has torch do.
  StreamHandle own_stream() const { return stream_->handle(); }
  /// A stream of the device in torch's terms.
  c10::Stream torch_stream(StreamHandle stream) const;
  /// The streams of the copies of sends and of receives: two, since devices copy both ways at a time.
  StreamHandle send_stream() const { return send_stream_->handle(); }
  StreamHandle receive_stream() const { return receive_stream_->handle(); }

  /// Makes the Group for the device's memory, unless it exists. Called at the same place in the order of collectives
  /// on all ranks.
  void make_group(const Call& call);

  /// The Group, or null if it has not been made yet. Callable from any thread.
  std::shared_ptr<Group> made_group() const;

  /// Whether collectives go on while their callers do.
  bool enqueues() const { return std::dynamic_pointer_cast<EnqueueGroup>(made_group()) != nullptr; }

  /// Held from when a collective is given to the device until it has its place in the queue, so that queue and device
  /// have the same order. Recursive, because the queue may run hooks at once, which start more collectives.
  std::recursive_mutex& order() { return order_; }

  /// "ipc: the ranks share devices": what moves the data, and why; empty until make_group() was called.
  std::string engine() const;

  /// Keeps what a failed collective owns until the device has done the work it was given by then.
  void release_after_failure(std::shared_ptr<void> owned) const noexcept;

  /// The CPU group. Its failures are failures of the device group as well.
  Group& host() const { return *host_; }

  /// Throws the failure that ended the group, if there is one.
  void check_alive(const Call& call) const;

  // These do the same as the functions of the Group that was made.
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
  std::shared_ptr<DeviceStream> send_stream_;
  std::shared_ptr<DeviceStream> receive_stream_;
  MadeDeviceGroup made_;  // guarded by mutex_; once there, its group stays
};

}  // namespace ours
