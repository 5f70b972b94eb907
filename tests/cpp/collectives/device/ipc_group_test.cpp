#include "collectives/device/ipc_group.h"

#include <atomic>

#include "device/deferred_release.h"
#include "support/device_ranks.h"

// Tests that are specific to groups that map each other's device memory; the contract of all groups is tested
// elsewhere.

namespace ours {
namespace {

using testing::call_of;
using testing::count_calls;
using testing::DeviceRank;
using testing::fractions;
using testing::ipc_maker;
using testing::run_on_devices;
using testing::StandInOptions;

/// In the order of ranks.
std::vector<float> sums(int ranks, size_t count) {
  std::vector<float> all(count);
  for (int r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < count; ++i) all[i] += testing::fraction(r, i);
  }
  return all;
}

Reduction sum_of(int ranks) { return {ReduceKind::Sum, ranks, 1.0}; }

TEST(ipc_has_one_driver_a_device_whose_kernels_share_the_elements) {
  for (const int devices : {1, 2, 4}) {
    run_on_devices(
        4, [&](int r) { return StandInOptions{std::to_string(r % devices)}; }, ipc_maker(0),
        [&](DeviceRank& rank) {
          uint64_t seq = 0;
          const auto reductions = count_calls(*rank.device, "reduce");
          for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{4097}}) {
            const int before = *reductions;
            std::vector<float> data = fractions(rank.number(), count);
            testing::sum(*rank.group, seq++, data);
            CHECK(data == sums(4, count));
            // A share ends at a multiple of 16 bytes, so five elements make two shares.
            const int shares = std::min<int>(devices, static_cast<int>((count + 3) / 4));
            CHECK_EQ(*reductions - before, rank.number() < shares ? 1 : 0);
          }
        });
  }
}

TEST(ipc_scatters_a_reduction_by_one_kernel_a_device) {
  run_on_devices(
      4, [](int r) { return StandInOptions{r < 3 ? "a" : "b"}; }, ipc_maker(0),
      [](DeviceRank& rank) {
        const auto reductions = count_calls(*rank.device, "reduce");
        const std::vector<size_t> counts{100, 7, 0, 50};
        std::vector<std::vector<float>> data;
        std::vector<const void*> inputs;
        for (size_t d = 0; d < 4; ++d) data.push_back(fractions(rank.number(), counts[d]));
        for (const auto& part : data) inputs.push_back(part.data());
        std::vector<float> out(counts[static_cast<size_t>(rank.number())]);
        rank.group->reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, 0), inputs, counts, out.data(),
                                   sum_of(4));
        CHECK(out == sums(4, out.size()));
        CHECK_EQ(reductions->load(), rank.number() == 0 || rank.number() == 3 ? 1 : 0);
      });
}

TEST(ipc_memory_is_kept_until_the_peers_have_let_go_of_it) {
  release_deferred();  // what earlier tests have left
  const size_t kept_before = count_deferred();
  std::atomic<int> step{0};
  run_on_devices(
      2, [](int) { return StandInOptions{}; }, ipc_maker(4096),
      [&](DeviceRank& rank) {
        std::vector<float> data = fractions(rank.number(), 3000);
        testing::sum(*rank.group, 0, data);
        if (rank.number() == 0) {
          rank.group.reset();
          // Rank 1 has mapped the memory that rank 0 left.
          testing::wait_until([&] { return count_deferred() == kept_before + 1; });
          release_deferred();
          CHECK_EQ(count_deferred(), kept_before + 1);
          step = 1;
        } else {
          testing::wait_until([&] { return step == 1; });
          rank.group.reset();
        }
      });
  testing::wait_until([&] {
    release_deferred();
    return count_deferred() == kept_before;
  });
}

TEST(let_go_board_is_one_for_all_who_open_it) {
  const auto first = LetGoBoard::create(3);
  const auto second = LetGoBoard::open(first->path(), 3);
  CHECK_THROWS(SystemError, LetGoBoard::open(first->path(), 4));
  CHECK_THROWS(SystemError, LetGoBoard::open("/proc/self/fd/none", 3));
  CHECK(first->have_peers_finished(0));
  first->finish_call(0);
  second->finish_call(1);
  CHECK(!first->have_peers_finished(0));
  // Rank 2 will not come again.
  second->let_go(2);
  CHECK(first->have_peers_finished(0) && !first->have_peers_let_go(0));
  second->let_go(1);
  CHECK(first->have_peers_let_go(0) && !first->have_peers_let_go(1));
}

}  // namespace
}  // namespace ours
