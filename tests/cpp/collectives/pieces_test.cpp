#include "collectives/pieces.h"

#include <numeric>

#include "support/testing.h"

namespace ours::testing {
namespace {

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

}  // namespace
}  // namespace ours::testing
