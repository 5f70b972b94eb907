#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/node_ranks.h"

// Large reductions whose ranks read in one another's memory. The first call of a size goes through the stages, the
// second and third are tries of the other way (see LendChoice).

namespace ours::testing {
namespace {

constexpr int kRanks = 3;
constexpr size_t kChunk = size_t{256} << 10;
constexpr size_t kCount = LendChoice::kLeastReduced / sizeof(float) + 1001;
constexpr uint32_t kStaged = 1 + (kCount * sizeof(float) + kChunk - 1) / kChunk;  // synchronisations
constexpr uint32_t kLent = 3;
constexpr uint32_t kFallback = kStaged + 1;

void run_large(const CountedRank& fn, bool direct = true) { run_counted(kRanks, kChunk, fn, direct); }

std::vector<float> sum_of_fractions(size_t count) {
  std::vector<float> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = (fraction(0, i) + fraction(1, i)) + fraction(2, i);
  return result;
}

TEST(lent_arrays_are_reduced_to_the_same_bits) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    const std::vector<float> expected = sum_of_fractions(kCount);
    for (uint64_t seq = 0; seq < 4; ++seq) {
      std::vector<float> data = fractions(group.rank(), kCount);
      sum(group, seq, data);
      CHECK(data == expected);
      CHECK_EQ(synchronisations(), seq == 1 || seq == 2 ? kLent : kStaged);
    }
  });
}

TEST(lent_arrays_may_lie_in_pieces_that_each_rank_cuts_differently) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    const std::vector<float> expected = sum_of_fractions(kCount);
    for (uint64_t seq = 0; seq < 2; ++seq) {
      std::vector<std::vector<float>> parts;
      std::vector<Span> pieces;
      const std::vector<float> data = fractions(group.rank(), kCount);
      const size_t step = 50000 + 1777 * static_cast<size_t>(group.rank());
      for (size_t at = 0; at < kCount; at += step) {
        const size_t end = std::min(kCount, at + step);
        parts.emplace_back(data.begin() + static_cast<ptrdiff_t>(at), data.begin() + static_cast<ptrdiff_t>(end));
      }
      for (auto& part : parts) pieces.push_back(span(part));
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), pieces, Reduction{ReduceKind::Sum, kRanks, 1.0});
      CHECK_EQ(synchronisations(), seq == 0 ? kStaged : kLent);
      std::vector<float> result;
      for (const auto& part : parts) result.insert(result.end(), part.begin(), part.end());
      CHECK(result == expected);
    }
  });
}

TEST(a_reduction_for_one_root_does_not_change_what_is_lent) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    const std::vector<float> expected = sum_of_fractions(kCount);
    for (uint64_t seq = 0; seq < 8; ++seq) {
      std::vector<float> data = fractions(group.rank(), kCount);
      if (seq % 2 == 0) {
        sum(group, seq, data);
      } else {
        const Call call = call_of(Op::Reduce, DType::Float32, seq);
        group.reduce(call, data.data(), data.data(), kCount, Reduction{ReduceKind::Sum, kRanks, 1.0}, 1);
      }
      if (seq % 2 == 0 || group.rank() == 1) CHECK(data == expected);
      CHECK_EQ(synchronisations(), seq == 2 || seq == 4 ? kLent : kStaged);
    }
  });
}

TEST(all_ranks_use_the_stages_if_one_cannot_lend) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    const std::vector<float> expected = sum_of_fractions(kCount);
    for (uint64_t seq = 0; seq < 4; ++seq) {
      const std::vector<float> data = fractions(group.rank(), kCount);
      std::vector<float> result = data;
      // What comes into another array is not lent.
      const float* const in = group.rank() == 1 ? data.data() : result.data();
      const Call call = call_of(Op::AllReduce, DType::Float32, seq);
      group.all_reduce(call, in, result.data(), kCount, Reduction{ReduceKind::Sum, kRanks, 1.0});
      CHECK(result == expected);
      CHECK_EQ(synchronisations(), seq == 1 || seq == 2 ? kFallback : kStaged);
    }
  });
}

TEST(nothing_is_lent_where_the_system_forbids_it) {
  const auto reduce = [](NodeGroup& group, const auto& synchronisations) {
    for (uint64_t seq = 0; seq < 4; ++seq) {
      std::vector<float> data = values(group.rank(), kCount);
      sum(group, seq, data);
      CHECK_EQ(data[kCount - 1], value(0, kCount - 1) + value(1, kCount - 1) + value(2, kCount - 1));
      CHECK_EQ(synchronisations(), kStaged);
    }
  };
  run_large(reduce, false);
}

TEST(lent_arrays_of_a_reduce_scatter_may_differ_in_size) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    const auto me = static_cast<size_t>(group.rank());
    const std::vector<size_t> counts{kCount / 2, 0, kCount - kCount / 2};
    const std::vector<float> expected = sum_of_fractions(kCount);
    for (uint64_t seq = 0; seq < 4; ++seq) {
      std::vector<float> data = fractions(group.rank(), kCount);
      const std::vector<const void*> inputs{data.data(), data.data() + counts[0], data.data() + counts[0]};
      // In place, on one rank, and on another over what goes to a third, which is not lent then.
      std::vector<float> own(counts[me]);
      float* const out = me == 0 ? data.data() : me == 2 && seq == 2 ? data.data() + counts[0] - 1 : own.data();
      const Call call = call_of(Op::ReduceScatter, DType::Float32, seq);
      group.reduce_scatter(call, inputs, counts, out, Reduction{ReduceKind::Sum, kRanks, 1.0});
      if (seq != 2) {
        const size_t begin = me == 0 ? 0 : counts[0];
        CHECK(std::equal(out, out + counts[me], expected.begin() + static_cast<ptrdiff_t>(begin)));
      }
      const uint32_t passed = synchronisations();
      const bool lent = seq == 1;
      CHECK(lent ? passed == 2 : passed > kStaged);
    }
  });
}

TEST(many_short_pieces_are_not_lent) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    for (uint64_t seq = 0; seq < 4; ++seq) {
      std::vector<float> data = values(group.rank(), kCount);
      std::vector<Span> pieces;
      constexpr size_t kShort = 5000;
      for (size_t at = 0; at < kCount; at += kShort) {
        pieces.push_back({data.data() + at, std::min(kShort, kCount - at) * sizeof(float)});
      }
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), pieces, Reduction{ReduceKind::Sum, kRanks, 1.0});
      CHECK_EQ(data[kCount - 1], value(0, kCount - 1) + value(1, kCount - 1) + value(2, kCount - 1));
      CHECK_EQ(synchronisations(), kStaged);
    }
  });
}

TEST(lent_memory_that_cannot_be_read_fails_all_ranks) {
  run_large([](NodeGroup& group, const auto&) {
    constexpr size_t kBytes = kCount / 1024 * 1024 * sizeof(float);
    void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    const auto reduce = [&](uint64_t seq) {
      const Call call = call_of(Op::AllReduce, DType::Float32, seq);
      group.all_reduce(call, {Span{memory, kBytes}}, Reduction{ReduceKind::Sum, kRanks, 1.0});
    };
    reduce(0);
    // A page of the first rank's slice, which this rank does not touch before the others have read it.
    if (group.rank() == 1) CHECK(::mprotect(static_cast<std::byte*>(memory) + 16384, 4096, PROT_NONE) == 0);
    CHECK_CONTAINS(CHECK_THROWS(Error, reduce(1)), "rank 0 (");
    CHECK_CONTAINS(CHECK_THROWS(Error, reduce(2)), "cannot read the memory of rank 1");
    ::munmap(memory, kBytes);
  });
}

}  // namespace
}  // namespace ours::testing
