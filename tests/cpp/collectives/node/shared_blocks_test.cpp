#include "collectives/node/shared_blocks.h"

#include "common/error.h"
#include "support/node_ranks.h"

namespace ours::testing {
namespace {

SharedBlock block_of(int rank, size_t bytes) { return {SymmetricBlock::make(bytes), {rank, -rank, 0, 0}}; }

TEST(shared_blocks_are_those_of_all_ranks) {
  for (const int ranks : {1, 2, 4}) {
    run_sessions(ranks, 0, [&](const std::shared_ptr<NodeSession>& session) {
      NodeGroup group(session);
      const SharedBlock own = block_of(group.rank(), 100);
      own.block->data()[99] = static_cast<std::byte>(group.rank() + 1);
      const auto all = share_blocks(group, call_of(Op::SymmetricRendezvous, DType::Opaque8, 1), own);
      CHECK_EQ(all.size(), static_cast<size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        const SharedBlock& one = all[static_cast<size_t>(r)];
        CHECK(one.block->data()[99] == static_cast<std::byte>(r + 1));
        CHECK_EQ(one.facts[1], int64_t{-r});
      }
      CHECK(all[static_cast<size_t>(group.rank())].block == own.block);
    });
  }
}

TEST(shared_blocks_that_cannot_be_mapped_fail_on_all_ranks_and_the_group_goes_on) {
  run_sessions(3, 0, [&](const std::shared_ptr<NodeSession>& session) {
    NodeGroup group(session);
    SharedBlock own = block_of(group.rank(), 100);
    // Rank 1 has its block from another one, whose descriptor is gone.
    if (group.rank() == 1) own.block = SymmetricBlock::open(SharedBlock(own).block->place());
    const Call call = call_of(Op::SymmetricRendezvous, DType::Opaque8, 1);
    CHECK_CONTAINS(CHECK_THROWS(Error, share_blocks(group, call, own)),
                   "rank 0 cannot map the symmetric memory of rank 1");
    const auto all =
        share_blocks(group, call_of(Op::SymmetricRendezvous, DType::Opaque8, 2), block_of(group.rank(), 1));
    CHECK_EQ(all.size(), size_t{3});
  });
}

TEST(shared_blocks_wait_for_all_ranks_and_compare_the_calls) {
  run_sessions(2, 0, [&](const std::shared_ptr<NodeSession>& session) {
    NodeGroup group(session);
    const Op op = group.rank() == 0 ? Op::SymmetricRendezvous : Op::WindowRegistration;
    const std::string differ =
        CHECK_THROWS(MismatchError, share_blocks(group, call_of(op, DType::Opaque8, 1), block_of(group.rank(), 1)));
    CHECK_CONTAINS(differ, "called rendezvous of symmetric memory number 1");
  });
  run_sessions(2, 0, [&](const std::shared_ptr<NodeSession>& session) {
    NodeGroup group(session);
    if (group.rank() == 1) return;
    const Call call = call_of(Op::SymmetricRendezvous, DType::Opaque8, 1, std::chrono::milliseconds(100));
    CHECK_THROWS(TimeoutError, share_blocks(group, call, block_of(0, 1)));
  });
}

}  // namespace
}  // namespace ours::testing
