#pragma once

#include <cstdint>
#include <vector>

#include "transport/tcp/tcp_call.h"

namespace ours {

/// All ranks of a call tell each other that they are in it: in round k, rank r tells rank r + 2^k and hears from rank
/// r - 2^k, so that after log2(size) rounds it has heard from all, directly or through others (Hensgen, Finkel and
/// Manber 1988, "Two algorithms for barrier synchronization"). Each checks that the others' calls are its own.
class Dissemination {
 public:
  /// Rounds are numbered from `first`, so that a call may have several disseminations.
  Dissemination(TcpCall& tcp, int rank, int size, uint32_t first = 0)
      : tcp_(tcp), place_(rank), size_(size), first_(first) {
    begin_round();
  }

  /// Only some ranks take part; this one is members[place].
  Dissemination(TcpCall& tcp, const std::vector<int>& members, int place, uint32_t first = 0)
      : tcp_(tcp), members_(&members), place_(place), size_(static_cast<int>(members.size())), first_(first) {
    begin_round();
  }

  /// Goes on as far as possible without waiting; returns true once all have been heard from.
  bool advance() {
    while (distance_ < size_ && tcp_.agreed(first_ + round_, rank_at(place_ - distance_ + size_))) {
      ++round_;
      distance_ *= 2;
      begin_round();
    }
    return distance_ >= size_;
  }

 private:
  void begin_round() {
    if (distance_ < size_) tcp_.agree(first_ + round_, rank_at(place_ + distance_));
  }
  int rank_at(int place) const {
    return members_ == nullptr ? place % size_ : (*members_)[static_cast<size_t>(place % size_)];
  }

  TcpCall& tcp_;
  const std::vector<int>* const members_ = nullptr;
  const int place_;
  const int size_;
  const uint32_t first_;
  uint32_t round_ = 0;
  int distance_ = 1;
};

}  // namespace ours
