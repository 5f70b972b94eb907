#pragma once

#include <cstdint>
#include <vector>

#include "transport/tcp/tcp_call.h"

namespace ours {

/// The ranks of a list, of which this one is members[place], tell each other that they are in a call: in round k, each
/// tells the member 2^k places further on and hears from the one 2^k places before it, so that after log2(size) rounds
/// it has heard from all, directly or through others (Hensgen, Finkel and Manber 1988, "Two algorithms for barrier
/// synchronization"). Each checks that the others' calls are its own.
class Dissemination {
 public:
  /// Rounds are numbered from `first`, so that a call may have several disseminations.
  Dissemination(TcpCall& tcp, const std::vector<int>& members, int place, uint32_t first = 0)
      : tcp_(tcp), members_(members), place_(static_cast<size_t>(place)), round_(first) {
    begin_round();
  }

  /// Goes on as far as possible without waiting; returns true once all have been heard from.
  bool advance() {
    while (distance_ < members_.size() && tcp_.agreed(round_, rank_at(place_ + members_.size() - distance_))) {
      ++round_;
      distance_ *= 2;
      begin_round();
    }
    return distance_ >= members_.size();
  }

 private:
  void begin_round() {
    if (distance_ < members_.size()) tcp_.agree(round_, rank_at(place_ + distance_));
  }
  int rank_at(size_t place) const { return members_[place % members_.size()]; }

  TcpCall& tcp_;
  const std::vector<int>& members_;
  const size_t place_;
  uint32_t round_;
  size_t distance_ = 1;
};

}  // namespace ours
