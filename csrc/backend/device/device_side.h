#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backend/device/disposal.h"
#include "collectives/device/device_group.h"
#include "collectives/group.h"
#include "device/device_library.h"
#include "device/hold_check.h"

namespace ours {

/// What a process group has for the tensors of a device: the device itself, and the Group that works in its memory,
/// which is made in the first collective that needs it. There is one device a group and rank.
class DeviceSide : public std::enable_shared_from_this<DeviceSide> {
 public:
  /// `host`: the same ranks' group over CPU memory.
  explicit DeviceSide(std::shared_ptr<Group> host) : host_(std::move(host)) {}
  ~DeviceSide();
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  /// The device that use() has chosen, if it was called.
  std::optional<at::Device> device() const;

  /// Takes that device for the group. Throws ValueError where it has another one already, DeviceError where there can
  /// be none. Callable from any thread.
  void use(at::Device device);

  // ---- after use()
  Device& accelerator() const { return *accelerator_; }
  /// The stream that is torch's current one on the calling thread.
  StreamHandle current_stream() const;
  /// A stream of the group's own in torch's terms, which no user of torch can come by, so that nothing in it is ever
  /// held. For what a collective has torch do.
  c10::Stream own_stream() const { return stream_of(*stream_); }
  /// A stream of the device in torch's terms.
  c10::Stream stream_of(const DeviceStream& stream) const;
  StreamHandle own_handle() const { return stream_->handle(); }
  /// The stream of the copies of sends and receives.
  const DeviceStream& transfer_stream() const { return *transfer_stream_; }

  /// Whether `stream` may wait for an operation: not where it could hold up the streams of this or another group. Tries
  /// it the first time; warns where it never can.
  bool may_hold(StreamHandle stream);

  /// The Group for the device's memory; the first call makes it, at the same place in the order of collectives on all
  /// ranks.
  Group& group(const Call& call);

  /// That, or null where no collective has made it yet. Callable from any thread.
  std::shared_ptr<Group> made_group() const;

  /// Whether a collective of the device's tensors has ended well.
  bool works() const { return works_.load(std::memory_order_acquire); }
  void set_works() { works_.store(true, std::memory_order_release); }

  /// "ipc: the ranks share devices": what moves the data, and why that; empty until group() was called.
  std::string engine() const;

  /// Opens the gate, from when it is added until it is removed, as soon as an operation of the Group has failed: at
  /// once if one has. What ends on the device after a failure may wait for all streams.
  void add(StreamGate* gate);
  void remove(StreamGate* gate) noexcept;

  /// Keeps what `what` owns as long as the device may use it although its collective has failed: as long as this, and
  /// for ever where the device has not ended its work by then.
  void keep(std::function<void()> what);

  /// Where threads that run operations leave what may own tensors.
  const std::shared_ptr<Disposal>& disposal() const { return disposal_; }

  /// The CPU group, whose failures are the device's as well.
  Group& host() const { return *host_; }

  /// Throws the failure that ended the group, if there is one.
  void check_alive(const Call& call) const;

  // As the Group's, of the one that was made.
  void abort(const std::string& reason) const;
  void leave() const noexcept;

 private:
  void open_gates() noexcept;
  /// Whether the device has done all that these streams were given, or does so within a moment.
  bool have_ended(const std::vector<StreamHandle>& streams) const noexcept;

  const std::shared_ptr<Group> host_;
  const std::shared_ptr<Disposal> disposal_ = std::make_shared<Disposal>();
  std::atomic<bool> works_{false};
  std::mutex gates_mutex_;
  std::set<StreamGate*> gates_;  // guarded by gates_mutex_
  bool gates_opened_ = false;    // guarded by gates_mutex_
  mutable std::mutex mutex_;
  std::optional<at::Device> device_;  // guarded by mutex_; once set, it stays
  DeviceLibrary* library_ = nullptr;  // set with device_, as those below
  std::shared_ptr<Device> accelerator_;
  std::shared_ptr<DeviceStream> stream_;
  std::shared_ptr<DeviceStream> transfer_stream_;
  std::shared_ptr<HoldCheck> hold_check_;
  std::vector<std::function<void()>> kept_;  // guarded by mutex_
  MadeDeviceGroup made_;                     // guarded by mutex_; once there, its group stays
};

}  // namespace ours
