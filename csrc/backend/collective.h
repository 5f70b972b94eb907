#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "collectives/group.h"

namespace ours {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

/// A collective to run: its tensors, what to do with them, and how it was called.
struct Collective {
  DType dtype = DType::UInt8;
  Tensors inputs;
  TensorLists outputs;
  /// Does the operation, and owns all tensors that it touches.
  std::function<void(Group&, const Call&)> body;
  /// Whether body() is a single operation of the group, so that it can be called for its beginning first.
  bool can_begin = false;
  /// For a collective that works on the CPU without tensors: it runs after the current stream of this device.
  std::optional<at::Device> behind{};
  Op op{};  ///< this field and the following ones are filled in when it is launched
  bool async_op = true;
  std::chrono::milliseconds timeout{-1};  ///< < 0: the group's timeout
};

}  // namespace ours
