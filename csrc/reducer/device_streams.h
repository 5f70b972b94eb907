#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

// On an accelerator, memory is ready in one stream, and what runs in another stream has to wait for that. On the CPU
// all of this does nothing.

namespace ours {

/// The current stream of `device`, in this thread.
c10::Stream current_stream(c10::Device device);

/// A set of streams in which something was done.
class StreamSet {
 public:
  /// Notes the current stream of `device`.
  void note(c10::Device device);
  /// Makes the current stream of `device` wait for all that the noted ones on it have been given so far. Returns
  /// whether there are others than itself. Never waits itself.
  bool join(c10::Device device) const;
  void clear() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;  ///< no two equal; nearly always one
};

/// Keeps the tensor's memory from being reused before the current stream of its device has come this far.
void keep_for_current_stream(const at::Tensor& tensor);

}  // namespace ours
