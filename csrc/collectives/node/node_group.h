#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/node/shared_write.h"
#include "collectives/pieces.h"
#include "common/huge_pages.h"
#include "common/options.h"
#include "transport/node/core_spread.h"
#include "transport/node/node_barrier.h"
#include "transport/node/node_session.h"

namespace ours {

/// Collectives of ranks that share memory. Every operation is a sequence of rounds: write a chunk into the own stage,
/// synchronise, read the peers' stages; the writing of the next chunk falls into the same round, so that a round costs
/// one synchronisation. The first one also carries what was called, and is checked before anything is read.
///
/// The algorithms: node_all_reduce.cpp (all_reduce, reduce), node_heap_reduce.cpp (all_reduce),
/// node_reduce_scatter.cpp, node_exchange.cpp (all that moves data unchanged), node_monitored_barrier.cpp.
class NodeGroup final : public Group {
 public:
  explicit NodeGroup(std::shared_ptr<NodeSession> session, Setting write_around = options().write_around);

  int rank() const override { return session_->rank(); }
  int size() const override { return session_->size(); }

  void monitored_barrier(const Call& call, bool wait_all_ranks) override;

  std::shared_ptr<void> allocate(size_t bytes) override;
  bool allocates() const override { return session_->heap() != nullptr; }
  void abort(const std::string& reason) override;
  void fail(const std::exception_ptr& error) noexcept override { session_->failure().fail(error); }
  void refuse(const Call& call, const std::string& why) noexcept override;
  void leave() noexcept override { session_->leave(); }
  std::string failure() const override { return session_->failure().message(); }

 protected:
  void check_usable(const Call& /*call*/) override { session_->failure().check(); }
  void do_barrier(const Running& run) override;
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void guarded(const Running& run, const std::function<void()>& body) override;

 private:
  /// Composes its operations of this group's rounds, between which it goes over the network.
  friend class HierarchicalGroup;

  /// Writes what this rank calls to where the next sync publishes it.
  void publish_record(const CallRecord& record);
  void sync(const Call& call, const CallRecord& record);

  /// After the first sync: throws MismatchError unless all ranks published the same call.
  void check_records(const CallRecord& mine);

  /// Of all ranks' `in` into `out`, which may be null. Both have the same number of elements.
  void reduce_to(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                 const Reduction& reduction);
  void reduce_small(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                    const Reduction& reduction);
  void reduce_chunked(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                      const Reduction& reduction);

  /// Tells pages_ of a buffer of the user's. Not of one in the heap, which is on huge pages already.
  void saw_buffer(const void* data, size_t bytes);

  /// Publishes with the next sync where in the heap `data` lies, if it does; returns whether it does.
  bool publish_places(const Pieces& data, size_t element);
  /// After a failure has been recorded: makes sure that no peer writes to what publish_places() has published in this
  /// call, however late it is.
  void withdraw() noexcept;
  /// How many ranks published with the last sync that their data lies in the heap.
  int ranks_in_heap() const;
  /// Where the data of rank r lies, as it published with the last sync.
  std::vector<Span> places_of(int r) const;
  /// All ranks published where their data lies: reduces it there.
  void reduce_in_heap(const Call& call, const CallRecord& record, const Pieces& own, const Reduction& reduction);

  void publish_sizes(const ExchangePlan& plan);
  /// Of all ranks, as check_sizes().
  size_t check_published_sizes(const CallRecord& record);

  /// Waits for rank r's monitored barrier of that number; false if it will not come, or not in time.
  bool await_monitor(int r, uint32_t number, Deadline deadline);

  std::byte* stage(int rank, size_t parity) const;
  std::byte* result(int rank, size_t number) const;

  /// Takes the memory of this rank's stages, and of so many of its results, before their first use.
  void reserve_stage(size_t results = 2);

  std::shared_ptr<NodeSession> session_;
  NodeBarrier barrier_;
  CoreSpread spread_;
  SharedWrite write_;
  HugePages pages_{options().huge_pages};
  size_t results_reserved_ = 0;
  uint32_t monitored_ = 0;           ///< monitored barriers so far
  std::optional<uint32_t> exposed_;  ///< the sync with which this call published where its data lies in the heap
};

std::shared_ptr<Group> make_node_group(std::shared_ptr<NodeSession> session);

}  // namespace ours
