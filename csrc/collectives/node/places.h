#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "collectives/pieces.h"
#include "collectives/sources.h"
#include "transport/node/node_barrier.h"
#include "transport/node/node_session.h"

namespace ours {

/// Tells where the ranks' data for an operation lies. Each rank publishes the places of its own data in its stage
/// before the operation's first synchronisation: in the heap, where the peers read and write it if all have published
/// that, or in its own memory, where they read it (see LentReduction).
class Places {
 public:
  Places(NodeSession& session, const NodeBarrier& barrier) : session_(session), barrier_(barrier) {}

  /// Publishes, as of the next synchronisation, where `data` lies in the heap. Returns false if a part of it lies
  /// elsewhere, if it cannot be claimed (see NodeHeap::claim()), or if it has too many pieces.
  bool publish(const Pieces& data, size_t element);

  /// Where the data of rank r lies in the heap, which has published it with the last synchronisation.
  std::vector<Span> of(int r) const;

  /// Publishes, as of the next synchronisation, where `data` lies in this rank's memory. Returns false if others cannot
  /// read it there, or if it has too many pieces.
  bool lend(const Pieces& data, size_t element);

  /// Where the data of rank r lies in its memory, as it has published with the last synchronisation: no addresses of
  /// this process.
  std::vector<Span> lent_by(int r) const;

  /// Called when no peer writes to the published places: a new operation begins, or only some ranks' data lies in the
  /// heap.
  void forget() { published_.reset(); }

  /// Called when an operation has ended, after withdraw(): other groups may use the memory again.
  void end() noexcept;

  /// After a failure has been recorded: makes sure that no peer, however late, writes to what this rank published in
  /// this operation.
  void withdraw() noexcept;

 private:
  BufferPart* parts(int rank, size_t parity) const {
    return session_.at<BufferPart>(session_.layout().stage(static_cast<size_t>(rank), parity));
  }
  bool have_room_for(const Pieces& data) const {
    return data.places() <= session_.layout().chunk_bytes / sizeof(BufferPart);
  }
  /// What rank r has published, with each place as at(place) gives it.
  template <class At>
  std::vector<Span> published_by(int r, At&& at) const;

  NodeSession& session_;
  const NodeBarrier& barrier_;
  std::optional<uint32_t> published_;  ///< the number of the synchronisation
  bool claims_ = false;                ///< this operation has published places
};

/// Walks the buffers of a node's ranks in parallel: this rank's own, and those that its peers published. With `ranks` =
/// 1, for a rank that reads no other's buffer, only its own.
class HeapBuffers {
 public:
  HeapBuffers(const Places& places, int rank, int ranks, const Pieces& own, size_t element);

  /// Finds where element `at` of each rank's buffer lies, and returns how many elements from there on, up to `end`,
  /// are contiguous on all ranks.
  size_t find(size_t at, size_t end);

  /// The addresses that find() has found, by rank.
  const void** sources() { return sources_.data(); }
  void* found(int rank) { return const_cast<void*>(sources_.data()[rank]); }

 private:
  std::deque<Pieces> peers_;
  std::vector<const Pieces*> all_;
  Sources sources_;
};

}  // namespace ours
