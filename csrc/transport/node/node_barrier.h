#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/awaited.h"
#include "common/deadline.h"
#include "transport/node/gate.h"
#include "transport/node/gate_tree.h"
#include "transport/node/node_session.h"

namespace ours {

/// Synchronises the ranks of a group on one node. What a rank published before synchronisation e may be read until the
/// reader arrives at e + 1. Everything published lies in two places, used in turn: a rank that writes for e + 1 knows
/// that all have passed e, so none still reads what was written for e - 1. No operation needs a closing
/// synchronisation.
class NodeBarrier {
 public:
  /// `gather` puts together what ranks show; it may be null if they never do.
  NodeBarrier(NodeSession& session, Gather gather);

  /// The place, of the two, in which to write what the next sync publishes.
  size_t next_parity() const { return (epoch_ + 1) & 1; }

  /// The place, of the two, in which to read what the last sync published.
  size_t parity() const { return epoch_ & 1; }

  /// The number of the next sync.
  uint32_t next() const { return epoch_ + 1; }

  /// Whether all ranks have arrived at the sync of that number, so that any of them may have passed it.
  bool all_arrived(uint32_t number) const;
  /// Whether this rank could pass the last sync at which it arrived.
  bool is_open() const;

  /// A sync has two parts. The first publishes everything written so far, and waits for nobody. `shows` is what this
  /// rank shows; on all ranks it is null, or on none.
  void arrive(const Shown* shows = nullptr);

  /// The second waits until all ranks have done the same. `call` is the number of the call, which one of them may have
  /// refused. `what` describes the operation; it is called for error messages only.
  void await(Deadline deadline, uint64_t call, const std::function<std::string()>& what);

  /// What all ranks have shown with the last sync, if they have shown something.
  const Shown& shown() const { return session_.opening(parity()).shown; }

 private:
  Gate& gate(size_t number) const { return gates_[parity()][number]; }
  /// Who has come to a gate with this synchronisation.
  Came came(size_t gate) const;
  /// The ranks that have not come to their gates, and those that have to go on from a gate and have not.
  std::vector<int> awaited() const;
  void look_around(Deadline deadline, uint64_t call, const std::function<std::string()>& what, Awaited& awaited);

  NodeSession& session_;
  const Gather gather_;
  const GateTree tree_;
  const std::array<Gate*, 2> gates_;  // by parity
  uint32_t epoch_ = 0;                // number of the last synchronisation; wraps, so only differences count
};

}  // namespace ours
