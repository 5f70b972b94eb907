#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/dtype.h"
#include "common/error.h"
#include "kernels/reduce.h"

// What the layers above need of an accelerator, without its headers. A library that is loaded if there is an
// accelerator implements it (csrc/cuda); the tests have a stand-in whose streams are threads.

namespace ours {

/// The accelerator refused a call, or failed. The message has the call's name and what to do.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A stream in the accelerator's own terms (a cudaStream_t).
using StreamHandle = void*;

/// The bytes that one process sends to another so that it can map memory of a device. Larger than what the
/// accelerator itself needs (64 bytes), because they also say whose memory it is.
using MemoryHandle = std::array<unsigned char, 128>;

/// A stream of ours. It waits for no other stream unless it is told to, and has priority over those of the default
/// priority. Destroying it waits for nothing; the work it was given is still done.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual StreamHandle handle() const = 0;
};

/// A point in a stream. Several threads may query it at a time, but none while it is recorded.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Sets the point behind all that `stream` has been given so far.
  virtual void record(StreamHandle stream) = 0;
  /// Whether the device has come to the point; true if none was recorded. Never waits. Throws DeviceError if the
  /// device has failed.
  virtual bool reached() = 0;
  /// Makes the work that `stream` is given from now on wait for the point, as last set by record().
  virtual void block(StreamHandle stream) = 0;
};

/// The most ranks that can take part in a reduction on a device.
constexpr int kMostDeviceRanks = 64;

/// Returns `owned` with an owner that destroys it on a thread of its own, and waits only a moment for that. To free or
/// unmap memory, an accelerator may wait for all that it has under way, and so for kernels that wait for peers: a
/// thread on which a peer depends must not wait for them.
std::shared_ptr<void> end_aside(std::shared_ptr<void> owned);

/// One accelerator, seen from one process. All methods may be called from any thread, throw DeviceError, and leave
/// the thread's current device as it was.
///
/// Work given to a stream runs later: memory that it touches must stay until an event behind it has been reached.
class Device : public std::enable_shared_from_this<Device> {
 public:
  virtual ~Device() = default;

  /// A UUID: the same in all processes that see the same device, and different for every other device.
  virtual std::string identity() const = 0;
  /// The board that the device is, or is a part of (MIG): the same for all devices of that board in all processes,
  /// and different for every other board.
  virtual std::string hardware() const = 0;
  /// Whether kernels of this device can use the memory of the device with that identity.
  virtual bool reaches(const std::string& identity) const = 0;
  /// How much memory it has, in bytes.
  virtual size_t memory_bytes() const = 0;
  virtual std::unique_ptr<DeviceStream> make_stream() = 0;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  /// Whether `stream` is being captured into a graph.
  virtual bool is_capturing(StreamHandle stream) const = 0;
  /// Calls body(), which may call the accelerator's library by itself, for example to allocate memory, so that it
  /// breaks no capture of a stream by other threads.
  virtual void apart_from_captures(const std::function<void()>& body) const = 0;

  /// Host memory that the device copies from and to by itself (pinned). Zeroed, aligned to 64 bytes. It and memory()
  /// may be dropped on any thread (see end_aside()).
  std::shared_ptr<void> pinned_memory(size_t bytes) { return end_aside(make_pinned(bytes)); }
  /// Memory of the device that other processes of the node can map. Contents are undefined.
  std::shared_ptr<void> memory(size_t bytes) { return end_aside(make_memory(bytes)); }
  /// Returns a handle to share `memory`, which must be the very beginning of what memory() of this device returned.
  virtual MemoryHandle share(const void* memory) = 0;
  /// Maps memory that a process has shared of a device that this one reaches. Memory of this process itself keeps its
  /// address. The process that shared it must keep it until the returned pointer is dropped.
  virtual std::shared_ptr<void> map(const MemoryHandle& handle) = 0;

  /// Copies between any two of: memory of devices, pinned memory.
  virtual void copy(void* to, const void* from, size_t bytes, StreamHandle stream) = 0;

  /// Like reduce() of kernels/reduce.h, but for device memory: the same order and results, written to each of
  /// `results`. A result may be equal to one of the sources, but may not overlap one otherwise. At most
  /// kMostDeviceRanks of each.
  virtual void reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count,
                      DType dtype, const Reduction& reduction, StreamHandle stream) = 0;

 private:
  virtual std::shared_ptr<void> make_pinned(size_t bytes) = 0;
  virtual std::shared_ptr<void> make_memory(size_t bytes) = 0;
};

/// Returns once `event` is reached. Calls `look_around`, which may throw to end the wait, about every millisecond.
/// Throws TimeoutError saying "`what` ... within ..." after `deadline`.
void wait_reached(DeviceEvent& event, Deadline deadline, const std::function<void()>& look_around,
                  const std::string& what);

}  // namespace ours
