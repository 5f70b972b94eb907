#pragma once

#include <cstdint>
#include <utility>

#include "collectives/members.h"

namespace ours {

/// Members of a call tell each other that they are in it: in round k, each tells the member 2^k places further on and
/// hears from the one 2^k places before it, so that after log2(size) rounds it has heard from all, directly or through
/// others (Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization"). Each checks that the others'
/// calls are its own.
class Dissemination {
 public:
  /// Rounds are numbered from `first`, so that a call may have several disseminations.
  explicit Dissemination(Members members, uint32_t first = 0) : members_(std::move(members)), round_(first) {
    begin_round();
  }

  /// Goes on as far as possible without waiting; returns true once all have been heard from.
  bool advance() {
    while (distance_ < members_.size() &&
           members_.tcp.agreed(round_, members_.rank_at(members_.place + members_.size() - distance_))) {
      ++round_;
      distance_ *= 2;
      begin_round();
    }
    return distance_ >= members_.size();
  }

 private:
  void begin_round() {
    if (distance_ < members_.size()) members_.tcp.agree(round_, members_.rank_at(members_.place + distance_));
  }

  const Members members_;
  uint32_t round_;
  size_t distance_ = 1;
};

}  // namespace ours
