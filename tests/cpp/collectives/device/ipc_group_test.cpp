#include "collectives/device/ipc_group.h"

#include <atomic>
#include <cstring>
#include <numeric>

#include "device/deferred_release.h"
#include "support/device_ranks.h"

// Tests that are specific to groups that map each other's device memory; the contract of all groups is tested
// elsewhere.

namespace ours {
namespace {

using testing::call_of;
using testing::DeviceRank;
using testing::run_ipc;

std::vector<float> values(int rank, size_t count) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
  return all;
}

std::vector<float> sums(int ranks, size_t count) {
  std::vector<float> all(count);
  for (int r = 0; r < ranks; ++r) {
    const std::vector<float> one = values(r, count);
    for (size_t i = 0; i < count; ++i) all[i] += one[i];
  }
  return all;
}

/// Memory of the group's heap, filled with a rank's values.
std::shared_ptr<float> in_heap(Group& group, size_t count) {
  const auto memory = group.allocate(count * sizeof(float));
  const std::vector<float> data = values(group.rank(), count);
  std::memcpy(memory.get(), data.data(), count * sizeof(float));
  return std::static_pointer_cast<float>(memory);
}

Reduction sum_of(int ranks) { return {ReduceKind::Sum, ranks, 1.0}; }

Call all_reduce_call(uint64_t seq) { return call_of(Op::AllReduce, DType::Float32, seq); }

TEST(ipc_has_one_driver_a_device_whose_kernels_share_the_elements) {
  for (const int devices : {1, 2, 4}) {
    run_ipc(
        4, [&](int r) { return std::to_string(r % devices); }, 0,
        [&](DeviceRank& rank) {
          uint64_t seq = 0;
          for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{4097}}) {
            const int before = rank.device->counts().reductions;
            std::vector<float> data = values(rank.number(), count);
            rank.group->all_reduce(all_reduce_call(seq++), data.data(), data.data(), count, sum_of(4));
            CHECK(data == sums(4, count));
            // A share ends at a multiple of 16 bytes, so five elements make two shares.
            const int shares = std::min<int>(devices, static_cast<int>((count + 3) / 4));
            CHECK_EQ(rank.device->counts().reductions - before, rank.number() < shares ? 1 : 0);
          }
        });
  }
}

TEST(ipc_scatters_a_reduction_by_one_kernel_a_device) {
  run_ipc(
      4, [](int r) { return r < 3 ? "a" : "b"; }, 0,
      [](DeviceRank& rank) {
        const std::vector<size_t> counts{100, 7, 0, 50};
        std::vector<std::vector<float>> data;
        std::vector<const void*> inputs;
        for (size_t d = 0; d < 4; ++d) data.push_back(values(rank.number(), counts[d]));
        for (const auto& part : data) inputs.push_back(part.data());
        std::vector<float> out(counts[static_cast<size_t>(rank.number())]);
        rank.group->reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, 0), inputs, counts, out.data(),
                                   sum_of(4));
        CHECK(out == sums(4, out.size()));
        CHECK_EQ(rank.device->counts().reductions, rank.number() == 0 || rank.number() == 3 ? 1 : 0);
      });
}

TEST(ipc_reduces_in_the_heap_without_copies) {
  run_ipc(
      3, [](int r) { return r < 2 ? "a" : "b"; }, 4096,
      [](DeviceRank& rank) {
        // At another place on each rank.
        std::vector<std::shared_ptr<void>> before;
        for (int i = 0; i < rank.number(); ++i) before.push_back(rank.group->allocate(5000));
        const size_t count = 100003;
        const auto data = in_heap(*rank.group, count);
        const auto counts = rank.device->counts();
        rank.group->all_reduce(all_reduce_call(0), data.get(), data.get(), count, sum_of(3));
        CHECK(std::vector<float>(data.get(), data.get() + count) == sums(3, count));
        CHECK_EQ(rank.device->counts().copies, counts.copies);
        CHECK_EQ(rank.device->counts().reductions - counts.reductions, rank.number() == 1 ? 0 : 1);
      });
}

TEST(ipc_reduces_pieces_in_the_heap_wherever_ranks_cut_them) {
  run_ipc(
      3, [](int) { return "a"; }, 4096,
      [](DeviceRank& rank) {
        const size_t count = 1000;
        const auto whole = in_heap(*rank.group, count);
        // Rank r has r + 1 pieces, the last of which lies outside the heap.
        const auto elsewhere = in_heap(*rank.group, count);
        std::vector<Span> pieces;
        const size_t step = count / (static_cast<size_t>(rank.number()) + 1) + 1;
        for (size_t at = 0; at < count; at += step) {
          const bool last = at + step >= count && rank.number() != 0;
          pieces.push_back({(last ? elsewhere : whole).get() + at, std::min(step, count - at) * sizeof(float)});
        }
        const auto counts = rank.device->counts();
        rank.group->all_reduce(all_reduce_call(0), pieces, sum_of(3));
        std::vector<float> all;
        for (const Span& piece : pieces) {
          const auto* const begin = static_cast<const float*>(piece.data);
          all.insert(all.end(), begin, begin + piece.bytes / sizeof(float));
        }
        CHECK(all == sums(3, count));
        CHECK_EQ(rank.device->counts().copies, counts.copies);
        // All ranks are cut at 0, 501 (from one rank), 334 and 668 (from another).
        CHECK_EQ(rank.device->counts().reductions, rank.number() == 0 ? 4 : 0);
      });
}

TEST(ipc_heap_grows_and_its_memory_is_zero_again) {
  run_ipc(
      2, [](int r) { return std::to_string(r); }, 4096,
      [](DeviceRank& rank) {
        const auto allocate = [&](size_t count) {
          return std::static_pointer_cast<float>(rank.group->allocate(count * sizeof(float)));
        };
        uint64_t seq = 0;
        std::vector<std::shared_ptr<float>> kept;
        const size_t large = size_t{9} << 20;
        for (const size_t count : {size_t{6} << 20, size_t{6} << 20, large}) {
          if (rank.number() == 1) kept.push_back(allocate(1));
          kept.push_back(allocate(count));
          float* const data = kept.back().get();
          data[count - 1] = static_cast<float>(rank.number() + 1);
          const auto counts = rank.device->counts();
          rank.group->all_reduce(all_reduce_call(seq++), data, data, count, sum_of(2));
          CHECK_EQ(rank.device->counts().copies, counts.copies);
          CHECK_EQ(data[count - 1], 3.0f);
        }
        float* const old = kept.back().get();
        for (size_t i = 0; i < large; i += 1000) old[i] = 5;
        kept.pop_back();
        const auto again = allocate(large);
        CHECK(again.get() == old);
        float sum = old[large - 1];
        for (size_t i = 0; i < large; i += 1000) sum += old[i];
        CHECK_EQ(sum, 0.0f);
        CHECK_EQ(reinterpret_cast<uintptr_t>(again.get()) % 4096, uintptr_t{0});
      });
}

TEST(ipc_reduces_where_only_some_ranks_have_their_data_in_the_heap) {
  run_ipc(
      3, [](int) { return "a"; }, 4096,
      [](DeviceRank& rank) {
        for (uint64_t seq = 0; seq < 3; ++seq) {
          const size_t count = 5001;
          std::vector<float> ordinary = values(rank.number(), count);
          const auto heap = in_heap(*rank.group, count);
          float* const data = rank.number() == static_cast<int>(seq) ? heap.get() : ordinary.data();
          rank.group->all_reduce(all_reduce_call(seq), data, data, count, sum_of(3));
          CHECK(std::vector<float>(data, data + count) == sums(3, count));
        }
      });
}

TEST(ipc_takes_more_steps_where_a_device_has_little_memory) {
  const auto devices = [](int rank) {
    testing::StandInOptions options;
    if (rank == 1) options.most_memory = size_t{4} << 20;
    return options;
  };
  testing::run_on_devices(3, devices, testing::ipc_maker(0), [](DeviceRank& rank) {
    const size_t count = size_t{1} << 20;
    std::vector<float> data = values(rank.number(), count);
    rank.group->all_reduce(all_reduce_call(0), data.data(), data.data(), count, sum_of(3));
    CHECK(data == sums(3, count));
    // 60 MiB were halved until they fitted; a third of the result is 1.25 MiB.
    CHECK_EQ(rank.device->counts().reductions, rank.number() == 0 ? 4 : 0);
  });
}

TEST(ipc_memory_is_kept_until_the_peers_have_let_go_of_it) {
  const size_t kept_before = count_deferred();
  std::atomic<int> step{0};
  const auto await = [&](int number) {
    while (step < number) std::this_thread::yield();
  };
  std::shared_ptr<float> tensor;
  run_ipc(
      2, [](int) { return "a"; }, 4096,
      [&](DeviceRank& rank) {
        std::vector<float> data = values(rank.number(), 3000);
        rank.group->all_reduce(all_reduce_call(0), data.data(), data.data(), data.size(), sum_of(2));
        if (rank.number() == 0) {
          rank.group.reset();
          // Rank 1 has mapped the memory that rank 0 left.
          CHECK_EQ(count_deferred(), kept_before + 1);
          step = 1;
          await(2);
          release_deferred();
          CHECK_EQ(count_deferred(), kept_before);
        } else {
          tensor = in_heap(*rank.group, 100);
          await(1);
          rank.group.reset();
          step = 2;
        }
      });
  // A tensor keeps its memory, whatever becomes of the group.
  CHECK(std::vector<float>(tensor.get(), tensor.get() + 100) == values(1, 100));
  tensor.reset();
  CHECK_EQ(count_deferred(), kept_before);
}

TEST(let_go_board_is_one_for_all_who_open_it) {
  const auto first = LetGoBoard::create(3);
  const auto second = LetGoBoard::open(first->path(), 3);
  CHECK(second != nullptr);
  CHECK_THROWS(SystemError, LetGoBoard::open(first->path(), 4));
  CHECK_THROWS(SystemError, LetGoBoard::open("/proc/self/fd/none", 3));
  CHECK(first->have_all_finished_calls_of(0));
  first->finish_call(0);
  second->finish_call(1);
  CHECK(!first->have_all_finished_calls_of(0));
  // Rank 2 will not come again.
  second->let_go(2);
  CHECK(first->have_all_finished_calls_of(0));
  CHECK(!first->is_free(0));
  second->let_go(1);
  CHECK(first->is_free(0) && !first->is_free(1));
}

}  // namespace
}  // namespace ours
