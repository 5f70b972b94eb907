#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

// The least that an all-reduce of float32 can do: a loop written by hand over buffers that all ranks map. Rank r adds
// up the r-th slice of all buffers, piece by piece, and writes the sums to all of them, which reads and writes every
// buffer once. Only the two meetings, before and after, come on top.

namespace zero_copy {

struct alignas(64) Turn {
  std::atomic<uint32_t> number{0};
};

struct Job {
  int ranks;
  int rank;
  size_t count;    // floats of a buffer
  Turn* turns;     // one a rank
  float* buffers;  // ranks * count

  float* buffer(int of) const { return buffers + static_cast<size_t>(of) * count; }
};

/// Returns when all ranks have come. Acquire and release: what a rank wrote before is seen by all after.
inline void meet(const Job& job) {
  std::atomic<uint32_t>& own = job.turns[job.rank].number;
  const uint32_t turn = own.load(std::memory_order_relaxed) + 1;
  own.store(turn, std::memory_order_release);
  for (int other = 0; other < job.ranks; ++other) {
    while (static_cast<int32_t>(job.turns[other].number.load(std::memory_order_acquire) - turn) < 0) sched_yield();
  }
}

inline void all_reduce(const Job& job) {
  constexpr size_t kPiece = 1024;  // floats of a sum that stays in the first-level cache until it is written
  const auto ranks = static_cast<size_t>(job.ranks);
  const auto rank = static_cast<size_t>(job.rank);
  meet(job);
  const size_t last = job.count * (rank + 1) / ranks;
  float sum[kPiece];
  for (size_t start = job.count * rank / ranks; start < last; start += kPiece) {
    const size_t size = std::min(kPiece, last - start);
    std::memcpy(sum, job.buffer(0) + start, size * sizeof(float));
    for (int other = 1; other < job.ranks; ++other) {
      const float* values = job.buffer(other) + start;
      for (size_t i = 0; i < size; ++i) sum[i] += values[i];
    }
    for (int other = 0; other < job.ranks; ++other) {
      std::memcpy(job.buffer(other) + start, sum, size * sizeof(float));
    }
  }
  meet(job);
}

}  // namespace zero_copy
