#pragma once

#include <algorithm>

#include "collectives/sources.h"
#include "common/partition.h"
#include "transport/node/domains.h"
#include "transport/node/node_layout.h"

namespace ours::node {

/// What one rank does of a reduction that goes from domain to domain.
class DomainPart {
 public:
  DomainPart(const Domains& domains, int rank, size_t element)
      : domains_(domains), rank_(rank), own_(domains.domain_of(rank)), align_(kCacheLine / element) {}

  int count() const { return domains_.count(); }
  int own() const { return own_; }
  int last() const { return domains_.count() - 1; }
  bool is_last() const { return own_ == last(); }

  /// The part of an array of `size` elements that a rank reduces for its domain.
  Slice slice(int rank, size_t size) const {
    return slice_of(size, domains_.size(domains_.domain_of(rank)), domains_.index_of(rank), align_);
  }
  Slice own_slice(size_t size) const { return slice(rank_, size); }

  /// Calls visit(rank, slice) for the parts of this rank's slice, with the rank of `domain` that has reduced each.
  template <class Visit>
  void visit_reduced(int domain, size_t size, Visit&& visit) const {
    const Slice own = own_slice(size);
    for (int i = 0; i < domains_.size(domain); ++i) {
      const int rank = domains_.rank_at(domain, i);
      const Slice theirs = slice(rank, size);
      const Slice both{std::max(own.begin, theirs.begin), std::min(own.end, theirs.end)};
      if (both.begin < both.end) visit(rank, both);
    }
  }

  /// Calls visit(rank) for the ranks of this one's domain.
  template <class Visit>
  void visit_own(Visit&& visit) const {
    for (int i = 0; i < domains_.size(own_); ++i) visit(domains_.rank_at(own_, i));
  }

  /// Sets the sources of a slice: the sum of the domains `before` this one, unless it is null, and source_of(rank) for
  /// the ranks of this one. Returns how many there are.
  template <class SourceOf>
  int fill(Sources& sources, const void* before, SourceOf&& source_of) const {
    int count = 0;
    if (before != nullptr) sources.data()[count++] = before;
    visit_own([&](int rank) { sources.data()[count++] = source_of(rank); });
    return count;
  }

 private:
  const Domains& domains_;
  const int rank_;
  const int own_;
  const size_t align_;
};

}  // namespace ours::node
