#include "transport/node/domains.h"

#include <algorithm>
#include <numeric>

namespace ours {

Domains::Domains(const std::vector<int>& keys, int least) : domain_of_(keys.size()), place_of_(keys.size()) {
  std::vector<int> known;  // keys, by domain
  for (size_t r = 0; r < keys.size(); ++r) {
    const auto found = std::find(known.begin(), known.end(), keys[r]);
    domain_of_[r] = static_cast<int>(found - known.begin());
    if (found == known.end()) known.push_back(keys[r]);
  }
  const auto is_bad = [&](int key) { return key < 0 || std::count(keys.begin(), keys.end(), key) < least; };
  if (std::any_of(known.begin(), known.end(), is_bad)) {
    std::fill(domain_of_.begin(), domain_of_.end(), 0);
    known.resize(1);
  }
  order_.resize(keys.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return domain_of(a) < domain_of(b); });
  firsts_.assign(known.size() + 1, static_cast<int>(keys.size()));
  for (int place = static_cast<int>(keys.size()) - 1; place >= 0; --place) {
    const int rank = rank_at(place);
    place_of_[static_cast<size_t>(rank)] = place;
    firsts_[static_cast<size_t>(domain_of(rank))] = place;
  }
}

Domains Domains::together() const {
  Domains one = *this;
  std::fill(one.domain_of_.begin(), one.domain_of_.end(), 0);
  one.firsts_ = {0, static_cast<int>(order_.size())};
  return one;
}

Domains Domains::equal(int ranks, int domains) {
  std::vector<int> keys(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) keys[static_cast<size_t>(r)] = r * std::min(domains, ranks) / ranks;
  return Domains(keys);
}

int Domains::smallest() const {
  int least = size(0);
  for (int domain = 1; domain < count(); ++domain) least = std::min(least, size(domain));
  return least;
}

}  // namespace ours
