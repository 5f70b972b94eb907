#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/codec.h"
#include "cuda/reduce_body.h"

// What one thread does when a tensor is flattened or unflattened: elements of many pieces go from one place to
// another, times a factor, and are rounded to another type. A kernel gets the table of pieces as its parameters. Its
// blocks are numbered through all pieces, and each belongs to one piece.

namespace ours::cuda {

/// The table of pieces fits into a kernel's parameters, which may have 4 KiB, so nothing has to be copied to the
/// device first.
constexpr int kMostPieces = 128;

struct FlatTask {
  const char* from[kMostPieces];
  char* to[kMostPieces];
  size_t count[kMostPieces];          ///< elements, at least one
  unsigned first_block[kMostPieces];  ///< the first block that works on the piece
  int pieces;
  double scale;
};
static_assert(sizeof(FlatTask) <= 4096, "parameters of a kernel");

/// Multiplies in float32, or in float64 if one of the types is that, and rounds once; to a half type by way of
/// float32.
template <class FromCodec, class ToCodec>
struct FlatSpec {
  using In = typename FromCodec::Stored;
  using Out = typename ToCodec::Stored;
  using Target = typename ToCodec::Value;
  using Value = std::conditional_t<std::is_same_v<typename FromCodec::Value, double>, double, Target>;
  struct Convert {
    Value factor;
    OURS_BOTH explicit Convert(double scale) : factor(static_cast<Value>(scale)) {}
    OURS_BOTH Out operator()(In x) const {
      return ToCodec::encode(static_cast<Target>(static_cast<Value>(FromCodec::decode(x)) * factor));
    }
  };
};

/// `kLanes` elements as one load or store.
template <class T, size_t kLanes>
struct alignas(sizeof(T) * kLanes) Lanes {
  T lane[kLanes];
};

template <class Spec>
struct FlatThread {
  using In = typename Spec::In;
  using Out = typename Spec::Out;
  using Convert = typename Spec::Convert;
  /// The number of elements that make 16 bytes of the larger type.
  static constexpr size_t kLanes = kVectorBytes / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
  /// Loads that a thread has under way at once: 64 bytes if a load has 16 bytes, otherwise about as many loads.
  static constexpr size_t kUnroll = sizeof(In) < sizeof(Out) ? 8 : 4;
  static constexpr size_t kTile = kThreads * kUnroll * kLanes;  ///< elements of a block
  using InLanes = Lanes<In, kLanes>;
  using OutLanes = Lanes<Out, kLanes>;

  static OURS_BOTH OutLanes convert(const Convert& one, const InLanes& in) {
    OutLanes out;
    OURS_UNROLL_ALL
    for (size_t k = 0; k < kLanes; ++k) out.lane[k] = one(in.lane[k]);
    return out;
  }

  /// The piece that `block` works on: the last one that begins at that block or before.
  static OURS_BOTH int piece_of(const FlatTask& task, size_t block) {
    int low = 0, high = task.pieces;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (task.first_block[middle] <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  /// The number of elements of a piece before those that can be loaded and stored together; all of them if none can.
  static OURS_BOTH size_t head_of(const char* from, const char* to, size_t count) {
    const size_t beyond_in = reinterpret_cast<size_t>(from) / sizeof(In) % kLanes;
    const size_t beyond_out = reinterpret_cast<size_t>(to) / sizeof(Out) % kLanes;
    const size_t head = (kLanes - beyond_out) % kLanes;
    return beyond_in != beyond_out || head > count ? count : head;
  }

  static OURS_BOTH void one(const Convert& convert_one, const char* from, char* to, size_t i) {
    store(to + i * sizeof(Out), convert_one(load<In>(from + i * sizeof(In))));
  }

  static OURS_BOTH void vectors(const Convert& one, const char* from, char* to, size_t count, size_t first) {
    if (first + (kUnroll - 1) * kThreads < count) {
      InLanes in[kUnroll];
      OURS_UNROLL_ALL
      for (size_t u = 0; u < kUnroll; ++u) in[u] = load<InLanes>(from + (first + u * kThreads) * sizeof(InLanes));
      OURS_UNROLL_ALL
      for (size_t u = 0; u < kUnroll; ++u) {
        store(to + (first + u * kThreads) * sizeof(OutLanes), convert(one, in[u]));
      }
      return;
    }
    for (size_t u = 0; u < kUnroll && first < count; ++u, first += kThreads) {
      store(to + first * sizeof(OutLanes), convert(one, load<InLanes>(from + first * sizeof(InLanes))));
    }
  }

  static OURS_BOTH void run(const FlatTask& task, size_t block, unsigned thread) {
    const int p = piece_of(task, block);
    const char* from = task.from[p];
    char* to = task.to[p];
    const size_t count = task.count[p], tile = block - task.first_block[p];
    const Convert convert_one(task.scale);
    const size_t head = head_of(from, to, count);
    const size_t in_vectors = (count - head) / kLanes;
    vectors(convert_one, from + head * sizeof(In), to + head * sizeof(Out), in_vectors,
            tile * kThreads * kUnroll + thread);
    // The elements before the first vector and behind the last one, or the whole piece if it has no vectors.
    const size_t scalars = count - in_vectors * kLanes;
    size_t i = tile * kTile + thread;
    for (size_t k = 0; k < kUnroll * kLanes && i < scalars; ++k, i += kThreads) {
      one(convert_one, from, to, i < head ? i : i + in_vectors * kLanes);
    }
  }
};

}  // namespace ours::cuda
