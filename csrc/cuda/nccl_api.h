#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "device/device.h"

namespace ours::cuda {

using NcclId = std::array<char, 128>;
using NcclComm = void*;

// With the values that they have for NCCL.
enum class NcclType : int { Int8, UInt8, Int32, UInt32, Int64, UInt64, Float16, Float32, Float64, BFloat16 };
enum class NcclOp : int { Sum, Product, Max, Min, Avg };

/// Where an operation runs.
struct NcclPlace {
  NcclComm comm;
  StreamHandle stream;
};

/// What is used of NCCL. Tests have another one. Nothing here waits for peers: an operation may be under way when its
/// call returns, and nothing else may be called with the communicator until ready(), but abort(). Throws DeviceError.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  virtual NcclId make_id() = 0;
  /// Sets `comm` also where it throws once there is one.
  virtual void init(int ranks, const NcclId& id, int rank, NcclComm& comm) = 0;
  /// Whether what was called last has been done, or given to the stream. Throws where the communicator has failed.
  virtual bool ready(NcclComm comm) = 0;
  /// Begins an orderly end, to be followed by destroy() once ready().
  virtual void finalize(NcclComm comm) = 0;
  virtual void destroy(NcclComm comm) noexcept = 0;
  /// Ends kernels that wait for peers, and frees all. This and destroy() may take long, or for ever: they wait for the
  /// device, and for the other ranks of the node to call them as well. On any thread.
  virtual void abort(NcclComm comm) noexcept = 0;

  /// What is called in between by this thread begins with end_group(), all at once.
  virtual void begin_group() = 0;
  virtual void end_group() = 0;

  virtual void all_reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclPlace at) = 0;
  virtual void reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op, int root, NcclPlace at) = 0;
  virtual void reduce_scatter(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclPlace at) = 0;
  virtual void broadcast(void* buffer, size_t bytes, int root, NcclPlace at) = 0;
  virtual void all_gather(const void* in, void* out, size_t bytes, NcclPlace at) = 0;
  virtual void send(const void* data, size_t bytes, int to, NcclPlace at) = 0;
  virtual void receive(void* data, size_t bytes, int from, NcclPlace at) = 0;
};

}  // namespace ours::cuda
