#include <algorithm>
#include <cstring>

#include "collectives/node/node_algorithms.h"
#include "common/partition.h"

// all_reduce of data that lies in the heap on all ranks, which are divided into domains. A block of the data goes from
// domain to domain, one in each round: the ranks of a domain reduce a slice of it each, which is the sum of the domains
// before and of their own domain's buffers, into their own buffer; those of the last one write the result to all of
// theirs. In the round after that, the ranks of the other domains fetch a slice each and write it to all buffers of
// their domain. Meanwhile the blocks after it are on their way. Of each block, one sum goes from domain to domain and
// one result to each; without domains, most of what a rank reads and writes would be memory of another one.

namespace ours::node {

namespace {

/// Enough that all domains are busy most of the time.
constexpr size_t kBlocks = 16;
/// Below, a rank would spend much of a round on its synchronisation.
constexpr size_t kLeastBlock = size_t{256} << 10;

class Blocks {
 public:
  Blocks(NodeRounds& rounds, const Running& run, const Reducing& job)
      : rounds_(rounds),
        domains_(rounds.domains()),
        dtype_(run.call.dtype),
        element_(size_of(dtype_)),
        count_(job.in.count()),
        own_(domains_.domain_of(rounds.rank())),
        last_(domains_.count() - 1),
        per_block_(std::max(piece_count(count_, kBlocks), kLeastBlock / element_)),
        piece_(piece_bytes(domains_.size(own_) + 1) / element_),
        reduction_(own_ == last_ ? job.reduction : unfinished(job.reduction)),
        buffers_(rounds.places(), rounds.rank(), rounds.size(), job.in, element_),
        sources_(rounds.size() + 1) {}

  void run(const Running& run) {
    const size_t blocks = piece_count(count_, per_block_);
    const auto own = static_cast<size_t>(own_);
    const auto reduced = static_cast<size_t>(domains_.count());  // how many rounds after the first domain's
    for (size_t round = 0; round < blocks + reduced; ++round) {
      const auto is_due = [&](size_t delay) { return round >= delay && round - delay < blocks; };
      if (is_due(own)) reduce_slice(round - own);
      if (is_due(reduced) && own_ != last_) fetch(round - reduced);
      rounds_.sync(run);
    }
  }

 private:
  /// The elements of a block that a rank of its domain reduces.
  Slice slice_of_rank(size_t block, int rank) const {
    const Slice all = piece_of(count_, per_block_, block);
    const int domain = domains_.domain_of(rank);
    const int i = domains_.place_of(rank) - domains_.first(domain);
    const Slice slice = slice_of(all.size(), domains_.size(domain), i, kCacheLine / element_);
    return {all.begin + slice.begin, all.begin + slice.end};
  }

  /// Calls visit(count) for the elements of `slice` in pieces that lie in one stretch in all ranks' buffers, which
  /// buffers_ has found.
  template <class Visit>
  void visit(const Slice& slice, Visit&& visit) {
    for (size_t at = slice.begin; at < slice.end;) {
      // Peers that have given up use their buffers again, so these must not be written.
      rounds_.session().failure().check();
      const size_t count = buffers_.find(at, std::min(slice.end, at + piece_));
      visit(count);
      at += count;
    }
  }

  void reduce_slice(size_t block) {
    const Slice own = slice_of_rank(block, rounds_.rank());
    if (own_ == 0) return reduce_part(own, -1);
    for (int i = 0; i < domains_.size(own_ - 1); ++i) {
      const int rank = domains_.rank_at(domains_.first(own_ - 1) + i);
      const Slice theirs = slice_of_rank(block, rank);
      reduce_part({std::max(own.begin, theirs.begin), std::min(own.end, theirs.end)}, rank);
    }
  }

  /// `before`: the rank in whose buffer the sum of the domains before is; -1: there is none.
  void reduce_part(const Slice& slice, int before) {
    const int first = before < 0 ? 0 : 1;
    visit(slice, [&](size_t count) {
      if (before >= 0) sources_.data()[0] = buffers_.found(before);
      for (int i = 0; i < domains_.size(own_); ++i) {
        sources_.data()[first + i] = buffers_.found(domains_.rank_at(domains_.first(own_) + i));
      }
      void* const result = buffers_.found(rounds_.rank());
      reduce(result, sources_.data(), first + domains_.size(own_), count, dtype_, reduction_);
      if (own_ == last_) write_to_all(result, count);
    });
  }

  void fetch(size_t block) {
    // Ranks of equal place read from one rank each, which all have the result.
    const int i = (domains_.place_of(rounds_.rank()) - domains_.first(own_)) % domains_.size(last_);
    const int from = domains_.rank_at(domains_.first(last_) + i);
    visit(slice_of_rank(block, rounds_.rank()), [&](size_t count) {
      void* const result = buffers_.found(rounds_.rank());
      std::memcpy(result, buffers_.found(from), count * element_);
      write_to_all(result, count);
    });
  }

  /// To the buffers of all others of this domain.
  void write_to_all(const void* result, size_t count) {
    for (int i = 0; i < domains_.size(own_); ++i) {
      const int rank = domains_.rank_at(domains_.first(own_) + i);
      if (rank != rounds_.rank()) rounds_.write().copy(buffers_.found(rank), result, count * element_);
    }
  }

  NodeRounds& rounds_;
  const Domains& domains_;
  const DType dtype_;
  const size_t element_;
  const size_t count_;
  const int own_;  ///< domain
  const int last_;
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
