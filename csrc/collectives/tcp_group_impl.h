#pragma once

#include <functional>

#include "collectives/call_checks.h"
#include "collectives/call_record.h"
#include "collectives/tcp_group.h"
#include "common/error.h"

// What the files that implement TcpGroup share.

namespace ours {

template <class Body>
void TcpGroup::guarded(Body&& body) {
  mesh_->check_usable();
  try {
    body();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

/// All ranks of a call tell each other that they are in it: in round k, rank r tells rank r + 2^k and hears from rank
/// r - 2^k, so that after log2(size) rounds it has heard from all, directly or through others (Hensgen, Finkel and
/// Manber 1988, "Two algorithms for barrier synchronization"). Each checks that the others' calls are its own.
class Dissemination {
 public:
  /// Rounds are numbered from `first`, so that a call may have several.
  Dissemination(TcpCall& tcp, int rank, int size, uint32_t first = 0)
      : tcp_(tcp), rank_(rank), size_(size), first_(first) {
    begin_round();
  }

  /// Goes on as far as possible now; true once all have been heard from.
  bool advance() {
    while (distance_ < size_ && tcp_.agreed(first_ + round_, (rank_ - distance_ + size_) % size_)) {
      ++round_;
      distance_ *= 2;
      begin_round();
    }
    return distance_ >= size_;
  }

 private:
  void begin_round() {
    if (distance_ < size_) tcp_.agree(first_ + round_, (rank_ + distance_) % size_);
  }

  TcpCall& tcp_;
  const int rank_;
  const int size_;
  const uint32_t first_;
  uint32_t round_ = 0;
  int distance_ = 1;
};

}  // namespace ours
