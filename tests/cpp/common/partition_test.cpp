#include "common/partition.h"

#include <cstdint>

#include "support/testing.h"

namespace ours::testing {
namespace {

void check_cover(size_t count, int parts, size_t align) {
  size_t at = 0, smallest = SIZE_MAX, largest = 0;
  for (int i = 0; i < parts; ++i) {
    const Slice slice = slice_of(count, parts, i, align);
    CHECK_EQ(slice.begin, at);
    CHECK(slice.begin <= slice.end);
    CHECK(slice.end == count || slice.end % align == 0);
    at = slice.end;
    smallest = slice.size() < smallest ? slice.size() : smallest;
    largest = slice.size() > largest ? slice.size() : largest;
  }
  CHECK_EQ(at, count);
  // The slice that ends at `count` may be short of up to one block more.
  CHECK(largest - smallest < 2 * align);
  if (align == 1) CHECK(largest - smallest <= 1);
}

TEST(partition_covers_every_count_once) {
  for (size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{7}, size_t{8}, size_t{63}, size_t{64},
                       size_t{65}, size_t{1023}, size_t{1024}, size_t{1025}, size_t{1} << 33, SIZE_MAX / 16}) {
    for (int parts : {1, 2, 3, 4, 7, 8, 64, 1000}) {
      for (size_t align : {1, 4, 16, 64}) check_cover(count, parts, align);
    }
  }
}

TEST(partition_splits_as_documented) {
  // 10 elements over 4 parts: the first two get one more.
  const size_t ends[] = {3, 6, 8, 10};
  for (int i = 0; i < 4; ++i) CHECK_EQ(slice_of(10, 4, i).end, ends[i]);
  // One element over 3 parts: only the first has it.
  CHECK_EQ(slice_of(1, 3, 0).size(), 1u);
  CHECK(slice_of(1, 3, 1).empty());
  CHECK(slice_of(1, 3, 2).empty());
  // Aligned to 16: 20 elements are two blocks, the second is short.
  CHECK_EQ(slice_of(20, 2, 0, 16).end, 16u);
  CHECK_EQ(slice_of(20, 2, 1, 16).size(), 4u);
  CHECK(slice_of(20, 3, 2, 16).empty());
}

TEST(partition_near_the_largest_count_does_not_overflow) {
  const size_t count = SIZE_MAX;
  CHECK_EQ(slice_of(count, 3, 2, 1).end, count);
  CHECK_EQ(slice_of(count, 1, 0, 64).end, count);
  CHECK_EQ(slice_of(count, 2, 1, 64).end, count);
}

TEST(pieces_cover_every_count_once) {
  CHECK_EQ(piece_count(0, 8), 0u);
  CHECK(piece_of(0, 8, 0).empty());
  for (size_t count : {1, 7, 8, 9, 16, 17}) {
    size_t at = 0;
    for (size_t i = 0; i < piece_count(count, 8); ++i) {
      const Slice piece = piece_of(count, 8, i);
      CHECK_EQ(piece.begin, at);
      CHECK(!piece.empty());
      CHECK(piece.size() <= 8);
      at = piece.end;
    }
    CHECK_EQ(at, count);
    CHECK(piece_of(count, 8, piece_count(count, 8)).empty());
  }
}

}  // namespace
}  // namespace ours::testing
