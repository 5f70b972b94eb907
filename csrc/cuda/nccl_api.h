#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "device/device.h"

namespace ours::cuda {

using NcclId = std::array<char, 128>;
using NcclComm = void*;

// The values are NCCL's own.
enum class NcclType : int { Int8, UInt8, Int32, UInt32, Int64, UInt64, Float16, Float32, Float64, BFloat16 };
enum class NcclOp : int { Sum, Product, Max, Min, Avg };

/// The communicator and stream of an operation.
struct NcclPlace {
  NcclComm comm;
  StreamHandle stream;
};

/// The part of NCCL that is used; tests have another implementation. Nothing here waits for peers: an operation may
/// be under way when its call returns, and until ready(), only abort() may be called with the communicator. Throws
/// DeviceError.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  virtual NcclId make_id() = 0;
  virtual NcclComm init(int ranks, const NcclId& id, int rank) = 0;
  /// Whether the last call has been done, or given to the stream. Throws if the communicator has failed.
  virtual bool ready(NcclComm comm) = 0;
  /// Begins an orderly end; destroy() must follow once ready().
  virtual void finalize(NcclComm comm) = 0;
  virtual void destroy(NcclComm comm) noexcept = 0;
  /// Ends kernels that wait for peers, and frees everything. This and destroy() may take long, or never return: they
  /// wait for the device, and for the other ranks of the node to call them as well. Callable from any thread.
  virtual void abort(NcclComm comm) noexcept = 0;

  /// The calls of this thread between begin_group() and end_group() begin all at once, with end_group().
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
