#include "collectives/pieces.h"

#include <numeric>

#include "support/node_ranks.h"

namespace ours {
namespace {

using testing::call_of;
using testing::run_sessions;

/// `whole` cut at `cuts`, the last piece to the end.
std::vector<Span> cut(std::vector<float>& whole, const std::vector<size_t>& cuts) {
  std::vector<Span> spans;
  size_t begin = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const size_t end = i < cuts.size() ? cuts[i] : whole.size();
    spans.push_back({whole.data() + begin, (end - begin) * sizeof(float)});
    begin = end;
  }
  return spans;
}

TEST(pieces_give_every_element_once_and_in_order) {
  std::vector<float> whole(20);
  std::iota(whole.begin(), whole.end(), 0.0f);
  for (const std::vector<size_t>& cuts : {std::vector<size_t>{}, {5}, {0, 5, 5, 5, 11, 20}, {1, 2, 3}}) {
    const Pieces pieces(cut(whole, cuts), sizeof(float));
    CHECK_EQ(pieces.count(), whole.size());
    for (size_t begin = 0; begin <= whole.size(); ++begin) {
      for (size_t end = begin; end <= whole.size(); ++end) {
        size_t next = 0;
        pieces.visit(begin, end, [&](std::byte* data, size_t at, size_t n) {
          CHECK_EQ(at, next);
          CHECK(n > 0);
          for (size_t i = 0; i < n; ++i) {
            CHECK_EQ(reinterpret_cast<float*>(data)[i], static_cast<float>(begin + at + i));
          }
          next += n;
        });
        CHECK_EQ(next, end - begin);
      }
      if (begin == whole.size()) continue;
      const Pieces::Stretch stretch = pieces.stretch(begin);
      CHECK_EQ(*reinterpret_cast<float*>(stretch.data), whole[begin]);
      CHECK(stretch.count > 0 && begin + stretch.count <= whole.size());
    }
  }
  CHECK_EQ(Pieces(std::vector<Span>{}, 4).count(), size_t{0});
}

TEST(all_reduce_of_pieces_does_not_mind_where_ranks_cut) {
  for (size_t chunk : {size_t{4096}, size_t{0}}) {
    for (size_t count : {size_t{0}, size_t{1}, size_t{100}, size_t{5000}, size_t{70001}}) {
      run_sessions(3, chunk, [&](std::shared_ptr<NodeSession> session) {
        NodeGroup group(session);
        const auto rank = static_cast<size_t>(group.rank());
        std::vector<float> data(count);
        for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 97 + rank);
        std::vector<size_t> cuts;
        for (size_t at = 0; at < count; at += 1 + (at + 1) * (rank + 1)) cuts.push_back(at);
        group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), cut(data, cuts),
                         Reduction{ReduceKind::Sum, 3, 1.0});
        for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], static_cast<float>(3 * (i % 97) + 3));
      });
    }
  }
}

TEST(all_reduce_of_pieces_agrees_with_one_of_a_whole) {
  run_sessions(2, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeGroup group(session);
    std::vector<float> data(3000, 1.0f);
    const Call call = call_of(Op::AllReduce, DType::Float32, 0);
    const Reduction sum{ReduceKind::Sum, 2, 1.0};
    if (group.rank() == 0) {
      group.all_reduce(call, cut(data, {7, 2000}), sum);
    } else {
      group.all_reduce(call, data.data(), data.data(), data.size(), sum);
    }
    for (const float x : data) CHECK_EQ(x, 2.0f);
    // The total number of elements must agree.
    std::vector<float> more(group.rank() == 0 ? 10 : 11);
    CHECK_THROWS(MismatchError, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 1), cut(more, {3}), sum));
  });
}

}  // namespace
}  // namespace ours
