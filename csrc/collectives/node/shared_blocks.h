#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/group.h"
#include "transport/node/symmetric_block.h"

namespace ours {

/// A rank's block, mapped here, and what the rank says of it.
struct SharedBlock {
  std::shared_ptr<SymmetricBlock> block;
  std::array<int64_t, 4> facts;
};

/// Gives all ranks of a node each other's blocks. Returns, by rank, once every rank has mapped all of them. If one
/// cannot, all ranks throw the same Error, and the group goes on.
std::vector<SharedBlock> share_blocks(Group& group, const Call& call, const SharedBlock& own);

/// Where the blocks' data are, by rank.
std::vector<std::byte*> data_of(const std::vector<SharedBlock>& blocks);

}  // namespace ours
