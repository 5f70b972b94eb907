#pragma once

#include <memory>

namespace ours {

/// Keeps memory until the process ends: what the device may still touch cannot be given back.
void keep_forever(std::shared_ptr<void> memory) noexcept;

}  // namespace ours
