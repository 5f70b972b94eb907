#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "collectives/group.h"

// Calls of groups that many tests make.

namespace ours::testing {

inline Call call_of(Op op, DType dtype, uint64_t seq, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return Call{op, dtype, seq, Deadline::after(timeout)};
}

void barrier(Group& group, uint64_t seq, std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Adds up the ranks' data, in place.
void sum(Group& group, uint64_t seq, std::vector<float>& data,
         std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Small whole numbers, other ones for each rank, whose sums are exact.
float value(int rank, size_t i);
std::vector<float> values(int rank, size_t count);
/// The sums of values() over that many ranks.
std::vector<float> sums(int ranks, size_t count);

/// Whether both have the same bits. For sanitizers that is one access, and not one for each element.
bool same(const std::vector<float>& a, const std::vector<float>& b);

template <class T>
Span span(std::vector<T>& data) {
  return {data.data(), data.size() * sizeof(T)};
}
template <class T>
ConstSpan const_span(const std::vector<T>& data) {
  return {data.data(), data.size() * sizeof(T)};
}

/// A rank's numbers, whose sums are rounded, so that their bits depend on the order.
inline float fraction(int rank, size_t i) {
  return 1.0f / static_cast<float>(i * 3 + static_cast<size_t>(rank) * 7 + 1);
}
std::vector<float> fractions(int rank, size_t count);

}  // namespace ours::testing
