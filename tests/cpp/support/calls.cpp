#include "support/calls.h"

#include <algorithm>
#include <cstring>

namespace ours::testing {

void barrier(Group& group, uint64_t seq, std::chrono::milliseconds timeout) {
  group.barrier(call_of(Op::Barrier, DType::UInt8, seq, timeout));
}

void sum(Group& group, uint64_t seq, std::vector<float>& data, std::chrono::milliseconds timeout) {
  group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq, timeout), data.data(), data.data(), data.size(),
                   Reduction{ReduceKind::Sum, group.size(), 1.0});
}

namespace {

constexpr size_t kPeriod = 101;  // of value()

/// The elements, which repeat, are copied: for sanitizers these are a few accesses, and not one for each of them.
template <class Element>
std::vector<float> repeated(size_t count, Element&& element) {
  std::vector<float> all(count);
  size_t done = std::min(count, kPeriod);
  for (size_t i = 0; i < done; ++i) all[i] = element(i);
  for (size_t more; done < count; done += more) {
    more = std::min(done, count - done);  // whole periods, or the rest
    std::memcpy(all.data() + done, all.data(), more * sizeof(float));
  }
  return all;
}

}  // namespace

float value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % kPeriod); }

std::vector<float> values(int rank, size_t count) {
  return repeated(count, [rank](size_t i) { return value(rank, i); });
}

std::vector<float> sums(int ranks, size_t count) {
  return repeated(count, [ranks](size_t i) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) sum += value(r, i);
    return sum;
  });
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  // memcmp() takes no null pointers, which the data of empty vectors are.
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<float> fractions(int rank, size_t count) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = fraction(rank, i);
  return all;
}

}  // namespace ours::testing
