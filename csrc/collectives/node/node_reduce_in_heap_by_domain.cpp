#include <algorithm>
#include <cstring>

#include "collectives/node/domain_part.h"
#include "collectives/node/node_algorithms.h"
#include "collectives/partial_sums.h"
#include "common/partition.h"

// all_reduce of data that lies in the heap on all ranks, which are divided into domains. A block of the data goes from
// domain to domain, one in each round: the ranks of a domain reduce a slice of it each, which is the sum of the domains
// before and of their own domain's buffers, into their own buffer; those of the last one write the result to all of
// theirs. In the round after that, the ranks of the other domains fetch a slice each and write it to all buffers of
// their domain. Meanwhile the blocks after it are on their way. Of each block, one sum goes from domain to domain and
// one result to each; without domains, every rank would read and write the memory of all.

namespace ours::node {

namespace {

/// Enough that all domains are busy most of the time.
constexpr size_t kBlocks = 16;
/// With less, a rank would spend much of a round on its synchronisation.
constexpr size_t kLeastBlock = size_t{256} << 10;

class Blocks {
 public:
  Blocks(NodeRounds& rounds, const Running& run, const Reducing& job)
      : rounds_(rounds),
        domains_(rounds.domains()),
        dtype_(run.call.dtype),
        element_(size_of(dtype_)),
        count_(job.in.count()),
        part_(domains_, rounds.rank(), element_),
        per_block_(std::max(piece_count(count_, kBlocks), kLeastBlock / element_)),
        piece_(piece_bytes(domains_.size(part_.own()) + 1) / element_),
        reduction_(part_.is_last() ? job.reduction : plain(job.reduction)),
        buffers_(rounds.places(), rounds.rank(), rounds.size(), job.in, element_),
        sources_(rounds.size() + 1) {}

  void run(const Running& run) {
    const size_t blocks = piece_count(count_, per_block_);
    // How many rounds after the first domain.
    const auto own = static_cast<size_t>(part_.own());
    const auto reduced = static_cast<size_t>(part_.count());
    for (size_t round = 0; round < blocks + reduced; ++round) {
      const auto is_due = [&](size_t delay) { return round >= delay && round - delay < blocks; };
      if (is_due(own)) reduce_own(block(round - own));
      if (is_due(reduced) && !part_.is_last()) fetch(block(round - reduced));
      rounds_.sync(run);
    }
  }

 private:
  Slice block(size_t k) const { return piece_of(count_, per_block_, k); }

  /// Calls visit(count) for the elements of a slice of a block in pieces that lie in one stretch in all ranks' buffers,
  /// which buffers_ has found.
  template <class Visit>
  void visit(const Slice& all, const Slice& slice, Visit&& visit) {
    const size_t end = all.begin + slice.end;
    for (size_t at = all.begin + slice.begin; at < end;) {
      // Peers that have given up use their buffers again, so these must not be written.
      rounds_.session().failure().check();
      const size_t count = buffers_.find(at, std::min(end, at + piece_));
      visit(count);
      at += count;
    }
  }

  void reduce_own(const Slice& all) {
    if (part_.own() == 0) {
      return visit(all, part_.own_slice(all.size()), [&](size_t count) { reduce_piece(nullptr, count); });
    }
    // The sum of the domains before is in the buffer of the rank that has reduced it.
    part_.visit_reduced(part_.own() - 1, all.size(), [&](int rank, const Slice& slice) {
      visit(all, slice, [&](size_t count) { reduce_piece(buffers_.found(rank), count); });
    });
  }

  void reduce_piece(const void* before, size_t count) {
    const int sources = part_.fill(sources_, before, [&](int rank) { return buffers_.found(rank); });
    void* const result = buffers_.found(rounds_.rank());
    reduce(result, sources_.data(), sources, count, dtype_, reduction_);
    if (part_.is_last()) write_to_all(result, count);
  }

  void fetch(const Slice& all) {
    // All ranks of the last domain have the result. Each rank reads that of one, so that none is read by all.
    const int i = domains_.index_of(rounds_.rank()) % domains_.size(part_.last());
    const int from = domains_.rank_at(part_.last(), i);
    visit(all, part_.own_slice(all.size()), [&](size_t count) {
      void* const result = buffers_.found(rounds_.rank());
      std::memcpy(result, buffers_.found(from), count * element_);
      write_to_all(result, count);
    });
  }

  /// To the buffers of all others of this domain.
  void write_to_all(const void* result, size_t count) {
    part_.visit_own([&](int rank) {
      if (rank != rounds_.rank()) rounds_.write().copy(buffers_.found(rank), result, count * element_);
    });
  }

  NodeRounds& rounds_;
  const Domains& domains_;
  const DType dtype_;
  const size_t element_;
  const size_t count_;
  const DomainPart part_;
  const size_t per_block_;
  const size_t piece_;
  const Reduction reduction_;
  HeapBuffers buffers_;
  Sources sources_;
};

}  // namespace

void reduce_in_heap_by_domain(NodeRounds& rounds, const Running& run, const Reducing& job) {
  Blocks blocks(rounds, run, job);
  rounds.write().begin();
  blocks.run(run);
}

}  // namespace ours::node
