#include "collectives/device/staging_group.h"

#include "support/device_ranks.h"

// Tests of groups that go through the host's memory beyond the contract of all groups: what they copy and keep.

namespace ours {
namespace {

using testing::call_of;
using testing::DeviceRank;

void run_ranks(size_t kept, const std::function<void(DeviceRank&)>& fn) {
  testing::run_on_devices(2, [](int) { return testing::StandInOptions{}; }, testing::staging_maker(kept), fn);
}

TEST(staging_keeps_the_memory_of_the_largest_call_up_to_a_limit) {
  static constexpr size_t kKept = 4000;
  run_ranks(kKept * sizeof(float), [](DeviceRank& rank) {
    uint64_t seq = 0;
    int pinned = 0;
    rank.device->before("pinned_memory", [&] { ++pinned; });
    const auto allocations = [&](size_t count) {
      pinned = 0;
      std::vector<float> data(count, 1.0f);
      testing::sum(*rank.group, seq++, data);
      CHECK(data == std::vector<float>(count, 2.0f));
      return pinned;
    };
    CHECK_EQ(allocations(0), 0);
    CHECK_EQ(allocations(100), 1);
    CHECK_EQ(allocations(kKept), 1);
    CHECK_EQ(allocations(1), 0);
    CHECK_EQ(allocations(10 * kKept), 1);
    CHECK_EQ(allocations(6 * kKept), 0);
    CHECK_EQ(allocations(4 * kKept), 1);
    CHECK_EQ(allocations(10), 1);
  });
}

TEST(staging_copies_only_what_others_need) {
  run_ranks(0, [](DeviceRank& rank) {
    const auto copied = testing::count_calls(*rank.device, "copy");
    const auto copies = [&](const auto& operation) {
      const int before = *copied;
      operation();
      return *copied - before;
    };
    std::vector<float> data(2);
    const ConstSpan mine{&data[static_cast<size_t>(rank.number())], sizeof(float)};
    const std::vector<Span> all{{&data[0], sizeof(float)}, {&data[1], sizeof(float)}};
    const Span whole{data.data(), 2 * sizeof(float)};
    const Call broadcast = call_of(Op::Broadcast, DType::Float32, 1);
    CHECK_EQ(copies([&] { rank.group->broadcast(broadcast, whole, 0); }), 1);
    // An input that is part of the output comes down, and the other output goes up.
    const Call all_gather = call_of(Op::AllGather, DType::Float32, 2);
    CHECK_EQ(copies([&] { rank.group->all_gather(all_gather, mine, all); }), 2);
    const Call reduce = call_of(Op::Reduce, DType::Float32, 3);
    const Reduction sum{ReduceKind::Sum, 2, 1.0};
    CHECK_EQ(copies([&] { rank.group->reduce(reduce, data.data(), data.data(), 2, sum, 1); }), 1 + rank.number());
  });
}

}  // namespace
}  // namespace ours
