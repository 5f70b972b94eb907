#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "support/node_ranks.h"
#include "support/touched_pages.h"

// Reductions of ranks that are divided into domains. That results are right for all types, sizes and kinds of memory is
// in the contract of groups, which has kinds with domains.

namespace ours::testing {
namespace {

constexpr size_t kChunk = 4096;
constexpr size_t kCount = 20000;
constexpr size_t kInBlocks = 200000;  // so many that what is in the heap takes several blocks

Reduction sum_of(const Group& group) { return Reduction{ReduceKind::Sum, group.size(), 1.0}; }

/// Runs fn(group, session) on ranks that are bound to those sockets.
void run_on_sockets(const std::vector<int>& sockets, size_t domains,
                    const std::function<void(NodeGroup&, NodeSession&)>& fn) {
  const auto run = [&](const std::shared_ptr<NodeSession>& session) {
    NodeGroup group(session, small_node_rules(kChunk));
    fn(group, *session);
  };
  run_sessions(static_cast<int>(sockets.size()), kChunk, run, {true, domains, sockets});
}

std::vector<float> sum_in_order(const std::vector<int>& order, size_t count) {
  std::vector<float> result(count);
  for (size_t i = 0; i < count; ++i) {
    result[i] = fraction(order[0], i);
    for (size_t r = 1; r < order.size(); ++r) result[i] += fraction(order[r], i);
  }
  return result;
}

const std::vector<int> kByTurns{0, 1, 0, 1, 1, 0, 0, 1, 1, 0};
const std::vector<int> kOrder{0, 2, 5, 6, 9, 1, 3, 4, 7, 8};

TEST(short_and_long_arrays_are_added_up_domain_by_domain) {
  run_on_sockets(kByTurns, 0, [](NodeGroup& group, NodeSession&) {
    uint64_t seq = 0;
    for (const size_t count : {size_t{8}, kChunk / 16, kChunk, kCount}) {
      const std::vector<float> expected = sum_in_order(kOrder, count);
      std::vector<float> data = fractions(group.rank(), count);
      sum(group, seq++, data);
      CHECK(data == expected);

      const std::vector<float> in = fractions(group.rank(), count);
      std::vector<const void*> inputs(static_cast<size_t>(group.size()), in.data());
      const std::vector<size_t> counts(inputs.size(), count);
      group.reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, seq++), inputs, counts, data.data(),
                           sum_of(group));
      CHECK(data == expected);
    }
  });
}

TEST(arrays_in_the_heap_are_added_up_domain_by_domain) {
  // The same data in the heap of all ranks, and of all but one.
  run_on_sockets(kByTurns, 0, [](NodeGroup& group, NodeSession&) {
    const std::vector<float> expected = sum_in_order(kOrder, kInBlocks);
    const std::vector<float> own = fractions(group.rank(), kInBlocks);
    const auto memory = group.allocate(kInBlocks * sizeof(float));
    auto* const shared = static_cast<float*>(memory.get());
    uint64_t seq = 0;
    for (const int without : {-1, -1, 3}) {
      std::vector<float> ordinary = own;
      std::copy(own.begin(), own.end(), shared);
      float* const data = group.rank() == without ? ordinary.data() : shared;
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data, data, kInBlocks, sum_of(group));
      CHECK(std::equal(expected.begin(), expected.end(), data));
    }
  });
}

TEST(uneven_domains_reduce_pieces_of_any_type_in_blocks) {
  // Three domains, of 3, 2 and 2 ranks.
  run_on_sockets(std::vector<int>(7, 0), 3, [](NodeGroup& group, NodeSession&) {
    constexpr size_t kBytes = size_t{1} << 20;
    const auto memory = group.allocate(kBytes);
    uint64_t seq = 0;
    for (const DType dtype : {DType::Int8, DType::Int64, DType::Float64, DType::Complex128}) {
      const size_t element = size_of(dtype);
      for (int times = 0; times < 2; ++times) {
        auto* const numbers = static_cast<uint8_t*>(memory.get());
        // The lowest byte of each part of an element; as a number, that of a whole one or of the least one above 0.
        std::fill_n(numbers, kBytes, uint8_t{0});
        const size_t step = dtype == DType::Complex128 ? sizeof(double) : element;
        for (size_t at = 0; at < kBytes; at += step) numbers[at] = static_cast<uint8_t>(1 + at / step % 9);
        std::vector<Span> pieces;
        size_t at = 0;
        for (const size_t bytes : {size_t{4096} + 16, size_t{0}, size_t{700000}, kBytes - 4096 - 16 - 700000}) {
          pieces.push_back({numbers + at, bytes / element * element});
          at += bytes;
        }
        group.all_reduce(call_of(Op::AllReduce, dtype, seq++), pieces, sum_of(group));
        for (const Span& piece : pieces) {
          const auto* const data = static_cast<const uint8_t*>(piece.data);
          for (size_t i = 0; i < piece.bytes; i += step) {
            const size_t place = static_cast<size_t>(data - numbers) + i;
            CHECK_EQ(static_cast<int>(data[i]), static_cast<int>(7 * (1 + place / step % 9)));
          }
        }
      }
    }
  });
}

TEST(only_the_sum_of_all_is_divided_for_an_average) {
  run_on_sockets(kByTurns, 0, [](NodeGroup& group, NodeSession&) {
    std::vector<float> expected = sum_in_order(kOrder, kInBlocks);
    for (float& x : expected) x /= 10;
    const auto memory = group.allocate(kInBlocks * sizeof(float));
    uint64_t seq = 0;
    for (const bool in_heap : {true, false, true}) {
      std::vector<float> own = fractions(group.rank(), kInBlocks);
      float* const data = in_heap ? static_cast<float*>(memory.get()) : own.data();
      std::copy(own.begin(), own.end(), data);
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data, data, kInBlocks,
                       Reduction{ReduceKind::Avg, group.size(), 1.0});
      CHECK(std::equal(expected.begin(), expected.end(), data));
    }
  });
}

/// How many synchronisations an all-reduce takes.
uint32_t synchronisations(NodeGroup& group, NodeSession& session, uint64_t seq, DType dtype, ReduceKind kind) {
  std::vector<float> data(kCount);
  const uint32_t before = last_synchronisation(session);
  group.all_reduce(call_of(Op::AllReduce, dtype, seq), data.data(), data.data(),
                   kCount * sizeof(float) / size_of(dtype), Reduction{kind, group.size(), 0.5});
  return last_synchronisation(session) - before;
}

TEST(what_would_be_rounded_in_between_goes_without_domains) {
  for (const size_t domains : {2, 3}) {
    run_on_sockets({0, 0, 0, 0, 0, 0}, domains, [&](NodeGroup& group, NodeSession& session) {
      const size_t bytes = kCount * sizeof(float);
      const auto chunks = static_cast<uint32_t>((bytes + kChunk - 1) / kChunk);
      uint64_t seq = 0;
      CHECK_EQ(synchronisations(group, session, seq++, DType::BFloat16, ReduceKind::Sum), chunks + 1);
      CHECK_EQ(synchronisations(group, session, seq++, DType::Float32, ReduceKind::PremulSum), chunks + 1);
      const uint32_t by_domain = synchronisations(group, session, seq++, DType::Float32, ReduceKind::Sum);
      // A rank reduces as much of a chunk as without domains, so there are more chunks.
      CHECK(by_domain > static_cast<uint32_t>(domains) * (chunks - 2));
    });
  }
}

constexpr int kRanks = 8;

/// What the ranks of a node with 2 domains touch of the other domain's memory.
class Crossings {
 public:
  /// On all ranks, between calls: counts what this one touches of [data(r), data(r) + bytes) for each r of the other.
  template <class Data>
  void count(int rank, size_t bytes, Data&& data) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!pages_) pages_.emplace();
      for (int r = 0; r < kRanks; ++r) {
        if (r / (kRanks / 2) != rank / (kRanks / 2)) pages_->count(data(r), bytes, touched_[static_cast<size_t>(rank)]);
      }
    }
    ++ready_;
    wait_until([&] { return ready_ == kRanks; });
  }
  /// On all ranks after the call, while the memory is there.
  void end() {
    ++ended_;
    wait_until([&] { return ended_ == kRanks; });
    const std::lock_guard<std::mutex> lock(mutex_);
    pages_.reset();
  }

  void check_at_most(size_t pages) const {
    for (const auto& touched : touched_) CHECK(touched > 0 && touched <= pages);
  }

 private:
  std::mutex mutex_;
  std::array<std::atomic<size_t>, kRanks> touched_{};
  std::optional<TouchedPages> pages_;
  std::atomic<int> ready_{0}, ended_{0};
};

TEST(of_arrays_in_the_heap_a_rank_touches_one_slice_of_another_domain) {
  constexpr size_t kBytes = size_t{4} << 20;
  Crossings crossings;
  std::array<uint64_t, kRanks> offsets{};
  run_on_sockets({0, 0, 0, 0, 1, 1, 1, 1}, 0, [&](NodeGroup& group, NodeSession& session) {
    const auto memory = group.allocate(kBytes);
    auto* const data = static_cast<float*>(memory.get());
    std::fill_n(data, kBytes / sizeof(float), 1.0F);
    offsets[static_cast<size_t>(group.rank())] = session.heap().offset_of(data, kBytes);
    const auto reduce = [&](uint64_t seq) {
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), data, data, kBytes / sizeof(float), sum_of(group));
    };
    for (uint64_t seq = 0; seq < 3; ++seq) reduce(seq);  // the first ones may not find all heaps
    crossings.count(group.rank(), kBytes, [&](int r) { return session.heap().at(r, offsets[static_cast<size_t>(r)]); });
    reduce(3);
    crossings.end();
    CHECK_EQ(data[kBytes / sizeof(float) - 1], 4096.0F);
  });
  // The 16 blocks may each have a page that two ranks share.
  crossings.check_at_most(kBytes / 4 / TouchedPages::kPage + 16);
}

TEST(of_a_chunk_a_rank_touches_one_slice_of_another_domain) {
  constexpr size_t kBytes = size_t{512} << 10;
  Crossings crossings;
  NodeConfig config{kBytes, 4096};
  config.domains = 2;
  const auto leader = NodeSession::create(0, kRanks, config);
  const std::string address = leader->address();
  run_ranks(kRanks, [&](int rank) {
    // Each rank has a mapping of its own.
    const auto session = rank == 0 ? leader : NodeSession::open(rank, kRanks, address);
    session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
    NodeGroup group(session, small_node_rules(kBytes));
    std::vector<float> data = values(rank, kBytes / sizeof(float));
    sum(group, 0, data);
    const NodeLayout& layout = session->layout();
    crossings.count(rank, layout.stage_bytes(NodeLayout::kResults),
                    [&](int r) { return session->at<std::byte>(layout.stage(static_cast<size_t>(r), 0)); });
    sum(group, 1, data);
    crossings.end();
  });
  // It takes two chunks, and neither begins with a page.
  crossings.check_at_most(kBytes / 4 / TouchedPages::kPage + 2);
}

TEST(a_rank_that_aborts_fails_all_domains) {
  run_on_sockets({0, 0, 0, 0}, 2, [](NodeGroup& group, NodeSession&) {
    const auto memory = group.allocate(kCount * sizeof(float));
    std::vector<Span> data{{memory.get(), kCount * sizeof(float)}};
    group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data, sum_of(group));
    if (group.rank() == 3) return group.abort("enough");
    CHECK_CONTAINS(
        CHECK_THROWS(AbortedError, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 1), data, sum_of(group))),
        "enough");
  });
}

}  // namespace
}  // namespace ours::testing
