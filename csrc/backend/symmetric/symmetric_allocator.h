#pragma once

#include <memory>

#include "transport/node/symmetric_block.h"

namespace ours {

/// Makes torch.distributed._symmetric_memory work for tensors on the CPU, from torch 2.15 on: registers an allocator
/// named "ours", and makes it the one of the CPU unless there is one.
void register_symmetric_memory();

/// The block whose data begin at `data`; null if there is none.
std::shared_ptr<SymmetricBlock> find_symmetric_block(void* data);

}  // namespace ours
