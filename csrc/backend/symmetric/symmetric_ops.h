#pragma once

namespace ours {

/// Gives torch.ops.symm_mem kernels for tensors on the CPU, from torch 2.15 on: collectives on tensors in symmetric
/// memory, each between barriers of channel 0, and writes of words. What works by hardware (multimem) or by another
/// library has none.
void register_symmetric_ops();

}  // namespace ours
