#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "collectives/spans.h"

namespace ours {

/// Memory in several places that counts as one array of elements, in the order given. The memory is the caller's.
class Pieces {
 public:
  /// A single place, which needs no allocation.
  Pieces(void* data, size_t count, size_t element)
      : element_(element),
        count_(count),
        one_{static_cast<std::byte*>(data), 0, count},
        first_(&one_),
        last_(&one_ + 1) {}

  Pieces(const std::vector<Span>& spans, size_t element) : element_(element) {
    many_.reserve(spans.size());
    for (const Span& span : spans) {
      const size_t end = count_ + span.bytes / element;
      many_.push_back({static_cast<std::byte*>(span.data), count_, end});
      count_ = end;
    }
    first_ = many_.data();
    last_ = first_ + many_.size();
  }

  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  /// In elements.
  size_t count() const { return count_; }

  /// The array if it lies in one place, otherwise null.
  std::byte* whole() const { return places() == 1 ? first_->data : nullptr; }

  size_t places() const { return static_cast<size_t>(last_ - first_); }

  /// Elements that lie one after the other.
  struct Stretch {
    std::byte* data;
    size_t count;
  };

  /// The stretch that begins with element `at`, where at < count().
  Stretch stretch(size_t at) const {
    const Piece& piece = *piece_of(at);
    return {piece.data + (at - piece.begin) * element_, piece.end - at};
  }

  /// Calls visit(data, at, count) for the elements [begin, end) in order: `count` elements at `data`, the first of
  /// which is element begin + at.
  template <class Visit>
  void visit(size_t begin, size_t end, Visit&& visit) const {
    if (begin >= end) return;
    const size_t origin = begin;
    for (const Piece* piece = piece_of(begin); begin < end; ++piece) {
      const size_t last = std::min(end, piece->end);
      if (last == begin) continue;
      visit(piece->data + (begin - piece->begin) * element_, begin - origin, last - begin);
      begin = last;
    }
  }

  /// Copies the elements [begin, end) from, or to, memory in which they lie one after the other.
  void copy_in(size_t begin, size_t end, const std::byte* from) const {
    visit(begin, end,
          [&](std::byte* data, size_t at, size_t n) { std::memcpy(data, from + at * element_, n * element_); });
  }
  void copy_out(size_t begin, size_t end, std::byte* to) const {
    visit(begin, end,
          [&](const std::byte* data, size_t at, size_t n) { std::memcpy(to + at * element_, data, n * element_); });
  }

 private:
  struct Piece {
    std::byte* data;
    size_t begin;
    size_t end;
  };

  /// The last piece that begins at or before `at`; that is not an empty one if another begins at the same element.
  const Piece* piece_of(size_t at) const {
    return std::upper_bound(first_, last_, at, [](size_t i, const Piece& next) { return i < next.begin; }) - 1;
  }

  size_t element_;
  size_t count_ = 0;
  Piece one_{};
  std::vector<Piece> many_;
  const Piece* first_ = nullptr;
  const Piece* last_ = nullptr;
};

}  // namespace ours
