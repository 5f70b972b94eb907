#pragma once

#include <array>
#include <cstddef>

#include "collectives/node/faster_way.h"
#include "common/deadline.h"
#include "transport/node/node_session.h"

namespace ours {

/// Says whether the ranks of a node lend one another their memory for a large operation, or go through shared memory.
/// To read where data lies leaves more of the caches to it and takes fewer synchronisations, but costs system calls,
/// and ranks that only send wait meanwhile: which is faster depends on the processor, the ranks and the size, so it is
/// measured, by size. The first rank chooses, and shows with each operation what it wants in the next one of about that
/// size. So all know it beforehand.
class LendChoice {
 public:
  /// Below, the second synchronisation and the system calls cost more than the second copy of a message.
  static constexpr size_t kLeastMoved = size_t{256} << 10;
  /// Below, shared memory stays in the caches and reductions are about as fast there.
  static constexpr size_t kLeastReduced = size_t{2} << 20;

  /// Operations of fewer bytes do not lend.
  explicit LendChoice(size_t least = kLeastMoved) : least_(least) {}

  size_t least() const { return least_; }
  bool lends(size_t bytes) const { return bytes >= least_ && at(bytes).lends; }

  /// For the first rank: whether it wants memory to be lent in the next operation of that size, at least least().
  bool next(size_t bytes) { return at(bytes).way.next(); }
  /// For all ranks: what it wants.
  void hear(size_t bytes, bool lend_next) {
    if (bytes >= least_) at(bytes).lends = lend_next;
  }
  /// For the first rank: what an operation of at least least() took.
  void took(size_t bytes, bool lent, Clock::duration time) { at(bytes).way.took(lent, time, bytes); }

 private:
  struct Size {
    bool lends = false;
    FasterWay way;
  };

  size_t number(size_t bytes) const { return size_class(bytes, least_, sizes_.size()); }
  Size& at(size_t bytes) { return sizes_[number(bytes)]; }
  const Size& at(size_t bytes) const { return sizes_[number(bytes)]; }

  const size_t least_;
  std::array<Size, 16> sizes_;
};

/// An operation for which a LendChoice is asked. It lasts, without the wait for the other ranks to begin, until end().
class LendTiming {
 public:
  /// `may_lend`: whether this operation can be done in both ways; otherwise it tells nothing, and the first rank wants
  /// the same as before.
  LendTiming(LendChoice& choice, size_t bytes, const NodeSession& session, bool may_lend = true)
      : choice_(choice),
        bytes_(bytes),
        measures_(session.rank() == 0 && may_lend && bytes >= choice.least() && session.all_read()),
        lends_(choice.lends(bytes)),
        lend_next_(measures_ ? choice.next(bytes) : session.rank() == 0 && lends_),
        began_(now()) {}

  /// Whether the ranks are to lend their memory in this operation.
  bool lends() const { return lends_; }
  /// What this rank shows the others, and where the wait for them begins.
  bool arrive() {
    spent_ = now() - began_;
    return lend_next_;
  }
  /// What the first rank has shown, and where that wait ends.
  void go_on(bool lend_next) {
    choice_.hear(bytes_, lend_next);
    began_ = now();
  }
  void end() {
    if (measures_) choice_.took(bytes_, lends_, spent_ + (now() - began_));
  }

 private:
  Clock::time_point now() const { return measures_ ? Clock::now() : Clock::time_point{}; }

  LendChoice& choice_;
  const size_t bytes_;
  const bool measures_;
  const bool lends_;
  const bool lend_next_;
  Clock::time_point began_;
  Clock::duration spent_{};
};

}  // namespace ours
