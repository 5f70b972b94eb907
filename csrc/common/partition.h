#pragma once

#include <cassert>
#include <cstddef>

namespace ours {

/// Elements [begin, end) of a buffer.
struct Slice {
  size_t begin = 0;
  size_t end = 0;

  size_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
};

/// Slice `index` of `parts` nearly equal slices that cover [0, count) in order and without gaps. Every boundary except
/// `count` itself is a multiple of `align` elements, and sizes differ by at most `align`. If there are fewer blocks
/// than parts, the last slices are empty. Needs parts >= 1, 0 <= index < parts, align >= 1.
inline Slice slice_of(size_t count, int parts, int index, size_t align = 1) {
  assert(parts >= 1 && index >= 0 && index < parts && align >= 1);
  // Whole blocks are shared out, and the first `extra` slices get one more. Nothing overflows near SIZE_MAX.
  const size_t blocks = count / align + (count % align != 0 ? 1 : 0);
  const size_t base = blocks / static_cast<size_t>(parts);
  const size_t extra = blocks % static_cast<size_t>(parts);
  const auto first_block = [&](size_t i) { return base * i + (i < extra ? i : extra); };
  const auto element = [&](size_t block) { return block >= blocks ? count : block * align; };
  const auto i = static_cast<size_t>(index);
  return {element(first_block(i)), element(first_block(i + 1))};
}

/// The number of pieces of at most `piece` elements in [0, count); 0 for an empty buffer. Needs piece >= 1.
inline size_t piece_count(size_t count, size_t piece) {
  assert(piece >= 1);
  return count / piece + (count % piece != 0 ? 1 : 0);
}

/// Piece `index` of those; empty beyond the last one, so that ranks with fewer pieces can keep step with others.
inline Slice piece_of(size_t count, size_t piece, size_t index) {
  if (index >= piece_count(count, piece)) return {count, count};
  const size_t begin = index * piece;
  return {begin, count - begin < piece ? count : begin + piece};
}

}  // namespace ours
