#pragma once

#include <cstddef>
#include <vector>

namespace ours {

/// The ranks of a node by what they run on: those of one domain are near one another's memory. What the node's ranks
/// reduce, they add up domain by domain, and in the order of ranks within each. Equal on all ranks.
class Domains {
 public:
  /// Domains of ranks with the same key, in the order of their first ranks. There is only one if a rank has no key
  /// (-1), or if fewer than `least` have the same.
  explicit Domains(const std::vector<int>& keys, int least = 1);

  /// One domain of the same ranks in the same order.
  Domains together() const;

  /// The keys that divide ranks into `domains` of nearly equal size, one rank after the other.
  static std::vector<int> equal(int ranks, int domains);

  int count() const { return static_cast<int>(firsts_.size()) - 1; }
  int domain_of(int rank) const { return domain_of_[static_cast<size_t>(rank)]; }

  /// The rank at a place in the order in which the node adds up.
  int rank_at(int place) const { return order_[static_cast<size_t>(place)]; }
  int place_of(int rank) const { return place_of_[static_cast<size_t>(rank)]; }
  /// A domain has the places from first() on, size() of them.
  int first(int domain) const { return firsts_[static_cast<size_t>(domain)]; }
  int size(int domain) const { return first(domain + 1) - first(domain); }
  int smallest() const;

 private:
  std::vector<int> domain_of_;  ///< by rank
  std::vector<int> place_of_;   ///< by rank
  std::vector<int> order_;
  std::vector<int> firsts_;
};

}  // namespace ours
