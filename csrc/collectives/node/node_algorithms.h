#pragma once

#include <algorithm>
#include <cstddef>

#include "collectives/node/node_rounds.h"
#include "collectives/sources.h"

// The algorithms for ranks that share memory, each explained in the file of the same name.

namespace ours::node {

/// To wake another thread costs about as much as to copy that many bytes.
constexpr size_t kShort = size_t{128} << 10;

/// Every rank reduces the whole array, which must fit into a stage. node_reduce_whole.cpp
void reduce_whole(NodeRounds& rounds, const Running& run, const Reducing& job);

/// Every rank reduces a slice of each chunk, or of the buffers where they lie. node_reduce_direct.cpp
void reduce_direct(NodeRounds& rounds, const Running& run, const Reducing& job);

/// Reduces data in the heap, after all ranks have published where it lies there. node_reduce_in_heap.cpp
void reduce_in_heap(NodeRounds& rounds, const Running& run, const Reducing& job);
/// The same by domains. node_reduce_in_heap_by_domain.cpp
void reduce_in_heap_by_domain(NodeRounds& rounds, const Running& run, const Reducing& job);
/// How many bytes of each rank's buffer make a share, if the buffer has `bytes`. Shares are large enough that taking
/// one costs nothing, and small enough that every rank gets one and none waits long for the last.
size_t share_bytes(size_t bytes, int ranks);
/// The part of each rank's buffer that is reduced at a time, if one rank reads the buffers of that many: small enough
/// that what it has just read of all of them is still in its cache when it writes.
size_t piece_bytes(int ranks);

/// Reduces data that all ranks have published with Places::lend(). node_reduce_lent.cpp
void reduce_lent(NodeRounds& rounds, const Running& run, const Reducing& job);

/// Reduces arrays that ranks lend one another, in parts that go through this rank's cache.
class LentReduction {
 public:
  LentReduction(NodeRounds& rounds, const Running& run, const Reduction& reduction);

  /// Reduces `count` elements into `out`. `own` are this rank's; `read(rank, at, n, to)` gets elements of another's.
  template <class Read>
  void reduce(std::byte* out, const std::byte* own, size_t count, Read&& read) {
    for (size_t at = 0; at < count; at += part_) {
      const size_t n = std::min(part_, count - at);
      for (int i = 1; i < rounds_.size(); ++i) {
        // Each begins with the next rank, so that they do not all read the same memory at once.
        const int from = (rounds_.rank() + i) % rounds_.size();
        std::byte* const to = scratch_ + static_cast<size_t>(i - 1) * stride_;
        read(from, at, n, to);
        sources_.data()[rounds_.domains().place_of(from)] = to;
      }
      sources_.data()[rounds_.domains().place_of(rounds_.rank())] = own + at * element_;
      reduce_part(out + at * element_, n);
    }
  }

 private:
  void reduce_part(std::byte* out, size_t count);

  NodeRounds& rounds_;
  const DType dtype_;
  const Reduction& reduction_;
  const size_t element_;
  const size_t stride_;  ///< bytes
  const size_t part_;    ///< elements
  std::byte* const scratch_;
  Sources sources_;
};

/// node_reduce_scatter.cpp
void reduce_scatter(NodeRounds& rounds, const Running& run, const Scattering& job);

/// Implements all collectives that move data unchanged. node_exchange.cpp
void exchange(NodeRounds& rounds, const Running& run, const ExchangePlan& plan);

/// Long messages that each rank reads where they lie in the memory of others. node_exchange_direct.cpp
class DirectExchange {
 public:
  DirectExchange(NodeRounds& rounds, const ExchangePlan& plan) : rounds_(rounds), plan_(plan) {}

  /// Before the first synchronisation: publishes where this rank's messages lie, if they are long and others may read
  /// them there. Returns whether it did.
  bool lend();
  /// After it, if all ranks have: does the exchange.
  void run(const Running& run);

 private:
  NodeRounds& rounds_;
  const ExchangePlan& plan_;
};

/// Whether to begin an operation on the caller's thread: it takes so little time that the thread that waits for it may
/// as well do the rest, and it has a single round, so that no peer waits for that rest.
inline bool repays_no_thread(size_t rounds, size_t bytes) { return rounds <= 1 && bytes <= kShort; }

/// Called after a synchronisation with which all ranks published the sizes of their plans: throws MismatchError
/// unless they agree; returns the bytes of the longest message.
size_t check_published_sizes(const NodeRounds& rounds, const CallRecord& record);

/// The `number`-th monitored barrier of the session. node_monitored_barrier.cpp
void monitored_barrier(NodeSession& session, const Call& call, uint32_t number, bool wait_all_ranks);

/// Whether what the node's ranks reduce, arrays of `bytes` each, leaves the caches before it is read again.
bool leaves_cache(size_t bytes, int ranks);
/// Copies a part of a result: around the cache if the result leaves it, unless the part is so short that the fence
/// afterwards would cost more.
void copy_result(void* to, const void* from, size_t bytes, bool leaves);

}  // namespace ours::node
