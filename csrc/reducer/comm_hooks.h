#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

namespace ours {

/// Makes the C++ communication hook that c10d calls `type`. Both hooks average over the group; FP16_COMPRESS sends
/// half precision. ValueError if the type is unknown.
std::unique_ptr<c10d::CommHookInterface> make_builtin_hook(c10d::BuiltinCommHookType type,
                                                           const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace ours
