#pragma once

#include <cstddef>

#include "cuda/codec.h"
#include "device/device.h"

// What one thread of a reduction does. If all buffers have the same alignment within 16 bytes, most elements are
// loaded and stored as vectors of 16 bytes, and those before the first vector and after the last one by one;
// otherwise all are loaded one by one.

namespace ours::cuda {

constexpr unsigned kThreads = 256;  // in a block

/// The parameters of a kernel, which may have 4 KiB.
struct ReduceTask {
  const char* sources[kMostDeviceRanks];
  char* results[kMostDeviceRanks];
  int source_count;
  int result_count;
  size_t head;     ///< elements before the first vector
  size_t vectors;  ///< of 16 bytes
  size_t scalars;  ///< elements that are not in vectors, those of the head included
  double value;    ///< factor or divisor
};
static_assert(sizeof(ReduceTask) <= 4096, "parameters of a kernel");

/// Elements that one thread reduces one by one.
constexpr size_t kScalarsPerThread = 4;

/// A reduction of elements by an operation.
template <class ElementCodec, template <class> class Operation>
struct ReduceSpec {
  using Codec = ElementCodec;
  using Op = Operation<typename Codec::Value>;
  static constexpr size_t kElementBytes = sizeof(typename Codec::Stored);
  static constexpr size_t kAlignment = alignof(typename Codec::Stored);
  static constexpr size_t kLanes = kVectorBytes / kElementBytes;
  /// Vectors that a thread has under way at once: enough to keep the memory busy, while the sums stay in registers.
  /// For bytes, a vector has 16 sums.
  static constexpr size_t kUnroll = kLanes >= 16 ? 1 : (kLanes == 8 ? 2 : 4);
};

template <class Spec>
struct ReduceThread {
  using Codec = typename Spec::Codec;
  using Stored = typename Codec::Stored;
  using Value = typename Codec::Value;
  using Op = typename Spec::Op;
  static constexpr size_t kLanes = Spec::kLanes;

  struct Lanes {
    Value value[kLanes];
  };

  static OURS_BOTH Lanes decode(const Op& op, const Bits16& bits) {
    Stored stored[kLanes];
    memcpy(&stored, &bits, sizeof(stored));
    Lanes lanes;
    OURS_UNROLL_ALL
    for (size_t k = 0; k < kLanes; ++k) lanes.value[k] = op.before(Codec::decode(stored[k]));
    return lanes;
  }

  static OURS_BOTH Bits16 encode(const Op& op, const Lanes& lanes) {
    Stored stored[kLanes];
    OURS_UNROLL_ALL
    for (size_t k = 0; k < kLanes; ++k) stored[k] = Codec::encode(op.after(lanes.value[k]));
    Bits16 bits;
    memcpy(&bits, &stored, sizeof(stored));
    return bits;
  }

  /// kUnroll vectors of each source, which lie kThreads vectors apart. All are loaded before the first one is needed.
  template <size_t kUnroll>
  static OURS_BOTH void vectors(const ReduceTask& task, const Op& op, size_t first) {
    const size_t start = task.head * Spec::kElementBytes + first * kVectorBytes;
    constexpr size_t kStep = kThreads * kVectorBytes;
    Lanes sum[kUnroll];
    Bits16 bits[kUnroll];
    OURS_UNROLL_ALL
    for (size_t u = 0; u < kUnroll; ++u) bits[u] = load<Bits16>(task.sources[0] + start + u * kStep);
    OURS_UNROLL_ALL
    for (size_t u = 0; u < kUnroll; ++u) sum[u] = decode(op, bits[u]);
    for (int s = 1; s < task.source_count; ++s) {
      const char* source = task.sources[s] + start;
      OURS_UNROLL_ALL
      for (size_t u = 0; u < kUnroll; ++u) bits[u] = load<Bits16>(source + u * kStep);
      OURS_UNROLL_ALL
      for (size_t u = 0; u < kUnroll; ++u) {
        const Lanes next = decode(op, bits[u]);
        OURS_UNROLL_ALL
        for (size_t k = 0; k < kLanes; ++k) sum[u].value[k] = Op::combine(sum[u].value[k], next.value[k]);
      }
    }
    OURS_UNROLL_ALL
    for (size_t u = 0; u < kUnroll; ++u) bits[u] = encode(op, sum[u]);
    for (int r = 0; r < task.result_count; ++r) {
      char* result = task.results[r] + start;
      OURS_UNROLL_ALL
      for (size_t u = 0; u < kUnroll; ++u) store(result + u * kStep, bits[u]);
    }
  }

  static OURS_BOTH void scalar(const ReduceTask& task, const Op& op, size_t element) {
    const size_t at = element * Spec::kElementBytes;
    Value sum = op.before(Codec::decode(load<Stored>(task.sources[0] + at)));
    for (int s = 1; s < task.source_count; ++s) {
      sum = Op::combine(sum, op.before(Codec::decode(load<Stored>(task.sources[s] + at))));
    }
    const Stored bits = Codec::encode(op.after(sum));
    for (int r = 0; r < task.result_count; ++r) store(task.results[r] + at, bits);
  }

  static OURS_BOTH void run(const ReduceTask& task, size_t block, unsigned thread) {
    Op op;
    op.set(task.value);
    const size_t first = block * kThreads * Spec::kUnroll + thread;
    if (first + (Spec::kUnroll - 1) * kThreads < task.vectors) {
      vectors<Spec::kUnroll>(task, op, first);
    } else {
      for (size_t v = first; v < task.vectors; v += kThreads) vectors<1>(task, op, v);
    }
    size_t i = block * kThreads * kScalarsPerThread + thread;
    const size_t elements_in_vectors = task.vectors * kVectorBytes / Spec::kElementBytes;
    for (size_t k = 0; k < kScalarsPerThread && i < task.scalars; ++k, i += kThreads) {
      scalar(task, op, i < task.head ? i : i + elements_in_vectors);
    }
  }
};

/// The properties of a kernel on which its launch depends.
struct ReduceShape {
  size_t element_bytes = 0;
  size_t alignment = 0;
  size_t unroll = 0;
};

template <class Spec>
constexpr ReduceShape shape_of() {
  return {Spec::kElementBytes, Spec::kAlignment, Spec::kUnroll};
}

}  // namespace ours::cuda
