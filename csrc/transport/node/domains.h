#pragma once

#include <cstddef>
#include <vector>

namespace ours {

/// The division of a node's ranks into domains, whose ranks are near one another's memory; and the order in which the
/// node adds up: domain by domain, and by rank within each. The same on all ranks.
class Domains {
 public:
  /// Domains of ranks with the same key, in the order of their first ranks. There is only one if a rank has no key
  /// (-1), or if a key has fewer than `least` ranks.
  explicit Domains(const std::vector<int>& keys, int least = 1);

  /// That many domains of nearly equal size, of ranks that follow one another.
  static Domains equal(int ranks, int domains);

  /// One domain of the same ranks in the same order.
  Domains together() const;

  int count() const { return static_cast<int>(firsts_.size()) - 1; }
  int domain_of(int rank) const { return domain_of_[static_cast<size_t>(rank)]; }

  /// The rank at a place in the order in which the node adds up.
  int rank_at(int place) const { return order_[static_cast<size_t>(place)]; }
  int place_of(int rank) const { return place_of_[static_cast<size_t>(rank)]; }

  int size(int domain) const { return first(domain + 1) - first(domain); }
  int smallest() const;
  /// Which of its domain a rank is, and the rank that is that one.
  int index_of(int rank) const { return place_of(rank) - first(domain_of(rank)); }
  int rank_at(int domain, int index) const { return rank_at(first(domain) + index); }

 private:
  int first(int domain) const { return firsts_[static_cast<size_t>(domain)]; }

  std::vector<int> domain_of_;  ///< by rank
  std::vector<int> place_of_;   ///< by rank
  std::vector<int> order_;
  std::vector<int> firsts_;  ///< places, by domain; and then the number of ranks
};

}  // namespace ours
