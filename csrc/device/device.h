#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/dtype.h"
#include "common/error.h"
#include "kernels/reduce.h"

// What the layers above need of an accelerator, without its headers: a library that is loaded where there is one
// implements it (csrc/cuda), and the tests have a stand-in whose streams are threads.

namespace ours {

/// The accelerator refused a call, or failed; the message has the call's name and what to do.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// There is no more memory of the kind that was asked for; less of it may be had.
class DeviceOutOfMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// A stream in the accelerator's own terms (a cudaStream_t).
using StreamHandle = void*;

/// What one process tells another so that it can map memory of a device, as the bytes that travel. It is larger than
/// what the accelerator itself needs (64 bytes), because it also says whose memory it is.
using MemoryHandle = std::array<unsigned char, 128>;

/// A stream of ours. It waits for no other stream unless it is told to, and comes before those of the default priority.
/// Destroying it waits for nothing; what it has been given is still done.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual StreamHandle handle() const = 0;
};

/// A point in a stream. Several threads may ask for it at a time, but none while it is recorded.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// The point is behind all that `stream` has been given so far.
  virtual void record(StreamHandle stream) = 0;
  /// Whether the device has come to the point; true where none was recorded. Never waits. Throws DeviceError where the
  /// device has failed.
  virtual bool reached() = 0;
  /// What `stream` is given from now on waits for the point, which is what record() has last set.
  virtual void block(StreamHandle stream) = 0;
};

/// `count` elements somewhere, and their place in a flat array.
struct FlatPiece {
  void* data = nullptr;
  size_t offset = 0;  ///< in elements of the flat array
  size_t count = 0;
};

/// At most so many ranks can take part in a reduction on a device.
constexpr int kMostDeviceRanks = 64;

/// One accelerator, seen from one process. All methods may be called from any thread, and throw DeviceError. Which
/// device is the thread's current one is the same after as before.
///
/// Work given to a stream runs later: memory that it touches must stay until an event behind it has been reached.
class Device : public std::enable_shared_from_this<Device> {
 public:
  virtual ~Device() = default;

  virtual int index() const = 0;
  /// The same in all processes that see the same device, and in no others (a UUID).
  virtual std::string identity() const = 0;
  /// The board that it is, or is a part of (MIG): the same for all devices of that board, in all processes, and for no
  /// others.
  virtual std::string hardware() const = 0;
  /// Whether kernels of this device can use the memory of the device of that identity.
  virtual bool reaches(const std::string& identity) const = 0;
  virtual std::unique_ptr<DeviceStream> make_stream() = 0;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  /// Whether `stream` is being captured into a graph.
  virtual bool is_capturing(StreamHandle stream) const = 0;

  /// Host memory that the device copies from and to by itself (pinned). Zero, aligned to 64 bytes. To free this and
  /// memory() may wait for what the device has under way.
  virtual std::shared_ptr<void> pinned_memory(size_t bytes) = 0;
  /// Memory of the device that other processes of the node can map. Contents are undefined.
  virtual std::shared_ptr<void> memory(size_t bytes) = 0;
  /// `memory` is the very beginning of what memory() of this device returned.
  virtual MemoryHandle share(const void* memory) = 0;
  /// Maps what a process has shared of a device that this one reaches. What this process has shared itself is where it
  /// always was. The process that shared it must keep it until the returned pointer is dropped.
  virtual std::shared_ptr<void> map(const MemoryHandle& handle) = 0;

  /// Copies between any two of: memory of devices, pinned memory.
  virtual void copy(void* to, const void* from, size_t bytes, StreamHandle stream) = 0;

  /// As reduce() of kernels/reduce.h, of device memory, with the same order and results, written to each of `results`.
  /// A result may be equal to one of the sources, but may not overlap one otherwise. At most kMostDeviceRanks of each.
  virtual void reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count,
                      DType dtype, const Reduction& reduction, StreamHandle stream) = 0;

  /// flat[p.offset + i] = p.data[i] * scale, rounded to `flat_type`, for each piece p: one kernel for many of them.
  /// Types differ only among Float16, BFloat16, Float32 and Float64; `scale` is not 1 for these alone. The product is
  /// of float32, or of float64 where one of the types is that. Types that are equal are copied bit by bit if it is 1.
  virtual void flatten(void* flat, DType flat_type, const std::vector<FlatPiece>& pieces, DType piece_type,
                       double scale, StreamHandle stream) = 0;
  /// The other way: p.data[i] = flat[p.offset + i] * scale, rounded to `piece_type`.
  virtual void unflatten(const void* flat, DType flat_type, const std::vector<FlatPiece>& pieces, DType piece_type,
                         double scale, StreamHandle stream) = 0;
};

/// Returns once `event` is reached. Calls `look_around`, which may throw to end the wait, about every millisecond.
/// Throws TimeoutError saying "`what` ... within ..." after `deadline`.
void wait_reached(DeviceEvent& event, Deadline deadline, const std::function<void()>& look_around,
                  const std::string& what);

}  // namespace ours
