#include <algorithm>
#include <vector>

#include "support/node_ranks.h"
#include "transport/node/own_cores.h"

// Long messages between ranks of a node, which are copied through the stages or read where they lie.

namespace ours::testing {
namespace {

constexpr int kRanks = 3;
constexpr size_t kChunk = size_t{256} << 10;
constexpr size_t kCount = (size_t{2} << 20) / sizeof(float) + 1001;  // whichever cores the ranks have
constexpr uint32_t kCopied = 1 + kCount * sizeof(float) / kChunk;    // synchronisations
constexpr uint32_t kRead = 2;

/// Gathers values() of all ranks, `counts[r]` of rank r, and checks what comes.
void gather_all(NodeGroup& group, uint64_t seq, const std::vector<size_t>& counts) {
  const auto ranks = static_cast<int>(counts.size());
  const std::vector<float> own = values(group.rank(), counts[static_cast<size_t>(group.rank())]);
  std::vector<std::vector<float>> all;
  std::vector<Span> outputs;
  for (const size_t count : counts) all.emplace_back(count);
  for (auto& one : all) outputs.push_back(span(one));
  group.all_gather(call_of(Op::AllGather, DType::Float32, seq), const_span(own), outputs);
  for (int r = 0; r < ranks; ++r) {
    CHECK(all[static_cast<size_t>(r)] == values(r, counts[static_cast<size_t>(r)]));
  }
}

/// Sends each rank values() that depend on both ranks, and checks what comes. Rank 0 sends rank 2 `more` of them.
void exchange_all(NodeGroup& group, uint64_t seq, size_t more = 0) {
  const auto message = [more](int from, int to) {
    return values(from * kRanks + to, kCount + (from == 0 && to == 2 ? more : 0));
  };
  std::vector<std::vector<float>> out, in, expected;
  std::vector<ConstSpan> inputs;
  std::vector<Span> outputs;
  for (int r = 0; r < kRanks; ++r) {
    out.push_back(message(group.rank(), r));
    expected.push_back(message(r, group.rank()));
    in.emplace_back(expected.back().size());
  }
  for (const auto& one : out) inputs.push_back(const_span(one));
  for (auto& one : in) outputs.push_back(span(one));
  group.all_to_all(call_of(Op::AllToAll, DType::Float32, seq), inputs, outputs);
  CHECK(in == expected);
}

/// Broadcasts values() of a rank that does not choose the way, and checks what comes.
void broadcast_one(NodeGroup& group, uint64_t seq) {
  constexpr int kRoot = 1;
  std::vector<float> data = group.rank() == kRoot ? values(kRoot, kCount) : std::vector<float>(kCount);
  group.broadcast(call_of(Op::Broadcast, DType::Float32, seq), span(data), kRoot);
  CHECK(data == values(kRoot, kCount));
}

void run_large(const CountedRank& fn, bool direct = true) { run_counted(kRanks, kChunk, fn, direct); }

// The first call of a size goes through the stages, the second and third are tries of the other way.
TEST(long_messages_are_tried_in_both_ways_for_each_collective) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    for (uint64_t turn = 0; turn < 4; ++turn) {
      const bool read = turn == 1 || turn == 2;
      gather_all(group, 3 * turn, std::vector<size_t>(kRanks, kCount));
      CHECK_EQ(synchronisations(), read ? kRead : kCopied);
      exchange_all(group, 3 * turn + 1);
      CHECK_EQ(synchronisations() == kRead, read);
      broadcast_one(group, 3 * turn + 2);
      CHECK_EQ(synchronisations() == kRead, read);
    }
  });
}

TEST(shorter_messages_that_all_ranks_get_are_tried_where_each_has_a_core_and_read_otherwise) {
  const int crowd = std::min(static_cast<int>(allowed_cores().size()) + 1, 8);
  for (const int ranks : {2, crowd}) {
    const auto n = static_cast<size_t>(ranks);
    const bool own_cores = have_own_cores(std::vector<CoreShare>(n, own_share()));
    const CountedRank gather = [&](NodeGroup& group, const auto& synchronisations) {
      for (uint64_t turn = 0; turn < 4; ++turn) {
        gather_all(group, turn, std::vector<size_t>(n, 2 * kChunk / sizeof(float) + 1));
        CHECK_EQ(synchronisations(), own_cores && (turn == 0 || turn == 3) ? 3U : kRead);
      }
    };
    run_counted(ranks, kChunk, gather, true);
  }
}

TEST(messages_whose_sizes_differ_between_ranks_are_read_where_they_lie) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    for (uint64_t seq = 0; seq < 3; ++seq) {
      gather_all(group, seq, {kCount, 2 * kCount, kCount / 2});
      CHECK_EQ(synchronisations(), kRead);
    }
  });
}

TEST(ranks_that_see_equal_sizes_read_where_others_do) {
  run_large([](NodeGroup& group, const auto& synchronisations) {
    for (uint64_t seq = 0; seq < 4; ++seq) {
      exchange_all(group, seq, 1000);
      CHECK_EQ(synchronisations() == kRead, seq > 0);
    }
  });
}

TEST(a_rank_may_receive_over_what_it_sends_itself) {
  constexpr size_t kFew = kCount / 4;
  run_large([](NodeGroup& group, const auto& synchronisations) {
    const int me = group.rank(), next = (me + 1) % kRanks;
    for (uint64_t seq = 0; seq < 2; ++seq) {  // where each rank has a core, only the second would read
      std::vector<std::vector<float>> in, out(kRanks, std::vector<float>(kFew));
      std::vector<ConstSpan> inputs;
      std::vector<Span> outputs;
      for (int r = 0; r < kRanks; ++r) in.push_back(values(me * kRanks + r, kFew));
      for (auto& one : in) inputs.push_back(const_span(one));
      for (auto& one : out) outputs.push_back(span(one));
      if (me == 1) outputs[static_cast<size_t>(next)] = span(in[static_cast<size_t>(me)]);
      group.all_to_all(call_of(Op::AllToAll, DType::Float32, seq), inputs, outputs);
      CHECK(synchronisations() > kRead);  // that rank does not lend its memory
      for (int r = 0; r < kRanks; ++r) {
        const auto* const got = static_cast<const float*>(outputs[static_cast<size_t>(r)].data);
        CHECK(std::vector<float>(got, got + kFew) == values(r * kRanks + me, kFew));
      }
    }
  });
}

TEST(long_messages_are_only_copied_where_the_system_forbids_reading) {
  run_large(
      [](NodeGroup& group, const auto& synchronisations) {
        for (uint64_t seq = 0; seq < 3; ++seq) {
          gather_all(group, seq, std::vector<size_t>(kRanks, kCount));
          CHECK_EQ(synchronisations(), kCopied);
        }
      },
      false);
}

}  // namespace
}  // namespace ours::testing
