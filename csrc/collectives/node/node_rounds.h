#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include "collectives/exchange_plan.h"
#include "collectives/group.h"
#include "collectives/node/lend_choice.h"
#include "collectives/node/places.h"
#include "collectives/node/shared_write.h"
#include "collectives/sources.h"
#include "common/huge_pages.h"
#include "common/options.h"
#include "common/partition.h"
#include "transport/arrivals.h"
#include "transport/node/core_spread.h"
#include "transport/node/node_barrier.h"
#include "transport/node/node_session.h"

namespace ours {

/// The rounds of which operations of ranks that share memory consist. In each round a rank writes into places of its
/// own, synchronises, and reads what its peers wrote. Every place exists twice, used in turn: next_x() is where to
/// write what the next synchronisation publishes, and x_of(r) is where rank r wrote what the last one published. So a
/// rank may write the next chunk while it still reads this one, and a round costs one synchronisation.
class NodeRounds {
 public:
  NodeRounds(std::shared_ptr<NodeSession> session, Setting write_around);

  int rank() const { return session_->rank(); }
  int size() const { return session_->size(); }
  NodeSession& session() const { return *session_; }
  const Domains& domains() const { return session_->domains(); }
  /// The same ranks in the same order, as one domain.
  const Domains& together() const { return together_; }
  /// Sets source_of(rank) for all ranks, in that order.
  template <class SourceOf>
  void fill(Sources& sources, SourceOf&& source_of) const {
    for (int place = 0; place < size(); ++place) sources.data()[place] = source_of(together_.rank_at(place));
  }

  /// The first synchronisation of an operation, with which the ranks show what they called, and when. If the calls
  /// differ, throws the same MismatchError on all of them. If the call is for the beginning, returns false without
  /// waiting, and nothing else may be done until open() comes for the whole. `exchanged`: what this rank says of its
  /// data. `lend_next`: what the first rank wants.
  bool open(const Running& run, const Exchanged& exchanged = {}, bool lend_next = false);
  /// Whether open() has been called for the beginning, so that what it publishes has been written.
  bool has_begun() const { return begun_; }
  /// Then: whether open() would wait for nobody.
  bool all_have_begun() const { return barrier_.is_open(); }
  /// After it, until the next synchronisation: what all ranks have shown of their data, and what the first rank wants.
  const Exchanged& exchanged() const { return barrier_.shown().exchanged; }
  bool lend_next() const { return barrier_.shown().lend_next; }
  /// A later one.
  void sync(const Running& run) {
    sync(run, [] {});
  }
  /// The same. `meanwhile` is what this rank does while others are late, with nothing that they use.
  template <class Meanwhile>
  void sync(const Running& run, Meanwhile&& meanwhile) {
    barrier_.arrive();
    meanwhile();
    await(run);
  }
  /// A later one in a group of several nodes, where some ranks know more than others of when all made the call, and of
  /// who was asked to stop.
  void sync_and_pass_on(const Running& run);

  /// A place of kLineBytes, which takes no memory of the stages.
  static constexpr size_t kLineBytes = sizeof(Arrival::data);
  std::byte* next_line() { return next_arrival().data; }
  const std::byte* line_of(int r) const { return session_->block(r).arrival[barrier_.parity()].data; }

  /// A place of chunk_bytes().
  std::byte* next_stage() { return stage(rank(), barrier_.next_parity()); }
  const std::byte* stage_of(int r) const { return stage(r, barrier_.parity()); }
  /// This rank's stage as of the last synchronisation, and that of rank r as of the one before: whatever the others do
  /// not read in a stage may hold something for the round after.
  std::byte* own_stage() { return stage(rank(), barrier_.parity()); }
  const std::byte* stage_before(int r) const { return stage(r, barrier_.next_parity()); }
  size_t chunk_bytes() const { return session_->layout().chunk_bytes; }

  /// A place for a rank's reduced share of a chunk.
  std::byte* next_result() { return next_result_of(rank()); }
  const std::byte* result_of(int r) const { return result(r, barrier_.parity()); }
  /// The place of rank r, which leaves it to this one in an algorithm in which only some ranks have results.
  std::byte* next_result_of(int r) { return result(r, barrier_.next_parity()); }
  /// One of the NodeLayout::kResults results of rank r, for an algorithm that uses more than two in turn.
  std::byte* result(int r, size_t number) const {
    return session_->at<std::byte>(session_->layout().result(static_cast<size_t>(r), number));
  }

  /// A place for the sizes that an ExchangePlan writes.
  uint64_t* next_sizes() { return sizes(rank(), barrier_.next_parity()); }
  const uint64_t* sizes_of(int r) const { return sizes(r, barrier_.parity()); }
  /// A place for an address of this rank's memory for each rank, which may read there (NodeSession::read()).
  uint64_t* next_addresses() { return next_sizes() + 2 * static_cast<size_t>(size()); }
  const uint64_t* addresses_of(int r) const { return sizes_of(r) + 2 * static_cast<size_t>(size()); }

  /// Takes the memory of this rank's stages, and of that many of its results, before their first use.
  void reserve(size_t results = 0) {
    const size_t bytes = session_->layout().stage_bytes(results);
    if (bytes > reserved_) reserve_more(bytes);
  }
  /// The same for an operation that writes at most the first `bytes` of its stages, and no results. If those are few,
  /// it takes only kBeginning bytes of each stage.
  void reserve_beginning(size_t bytes) {
    if (bytes > kBeginning) {
      reserve();
    } else if (!has_beginning_ && reserved_ == 0) {
      take_beginning();
    }
  }

  /// Notes that an operation uses a buffer of the caller's: large ones that are used again and again are moved onto
  /// huge pages. Those of the heap are there already.
  void note_use(const void* data, size_t bytes);
  void note_use(const Pieces& data, size_t element);

  /// Copies into memory that peers read next.
  SharedWrite& write() { return write_; }
  void copy(const Pieces& from, const Slice& elements, std::byte* to, size_t element);

  Places& places() { return places_; }

  /// Whether memory is lent for reductions, for those whose result is divided, and for what moves data unchanged.
  LendChoice& reductions() { return reductions_; }
  LendChoice& scatterings() { return scatterings_; }
  LendChoice& exchanges(Movement movement) { return exchanges_[static_cast<size_t>(movement)]; }

 private:
  /// Shows the peers the call.
  void arrive(const Running& run, const Exchanged& exchanged, bool lend_next);
  /// Waits until all have arrived.
  void await(const Running& run);
  Arrival& next_arrival() { return session_->self().arrival[barrier_.next_parity()]; }
  static bool shows_stop(const Running& run);
  /// Takes in what all have shown of stops and arrivals.
  void hear(const Running& run);
  [[noreturn]] void throw_mismatch(uint64_t call);
  void reserve_more(size_t bytes);
  void take_beginning();

  std::byte* stage(int r, size_t parity) const {
    return session_->at<std::byte>(session_->layout().stage(static_cast<size_t>(r), parity));
  }
  uint64_t* sizes(int r, size_t parity) const {
    return session_->at<uint64_t>(session_->layout().table(static_cast<size_t>(r), parity));
  }

  const std::shared_ptr<NodeSession> session_;
  const Domains together_;
  NodeBarrier barrier_;
  CoreSpread spread_;
  SharedWrite write_;
  Places places_;
  LendChoice reductions_{LendChoice::kLeastReduced};
  LendChoice scatterings_{LendChoice::kLeastReduced};
  std::array<LendChoice, static_cast<size_t>(Movement::AllToAll) + 1> exchanges_;
  HugePages pages_{options().huge_pages};
  static constexpr size_t kBeginning = size_t{16} << 10;
  size_t reserved_ = 0;  ///< bytes
  bool has_beginning_ = false;
  bool begun_ = false;
  std::thread::id begun_on_;
};

}  // namespace ours
