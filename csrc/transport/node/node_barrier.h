#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "common/awaited.h"
#include "common/deadline.h"
#include "transport/node/node_session.h"

namespace ours {

/// Synchronises the ranks of a group on one node. What a rank published before synchronisation e may be read until the
/// reader arrives at e + 1. Everything published lies in two places, used in turn: a rank that writes for e + 1 knows
/// that all have passed e, so none still reads what was written for e - 1. No operation needs a closing
/// synchronisation.
class NodeBarrier {
 public:
  explicit NodeBarrier(NodeSession& session) : session_(session) {}

  /// The place, of the two, in which to write what the next sync publishes.
  size_t next_parity() const { return (epoch_ + 1) & 1; }

  /// The place, of the two, in which to read what the last sync published.
  size_t parity() const { return epoch_ & 1; }

  /// The number of the next sync.
  uint32_t next() const { return epoch_ + 1; }

  /// Whether all ranks have arrived at the sync of that number, so that any of them may have passed it.
  bool all_arrived(uint32_t number) const;
  /// Whether all have arrived where this rank did last.
  bool all_arrived() const { return all_arrived(epoch_); }

  /// Publishes everything written so far and waits until all ranks have done the same. `call` is the number of the
  /// call, which one of them may have refused. `what` describes the operation; it is called for error messages only.
  void sync(Deadline deadline, uint64_t call, const std::function<std::string()>& what) {
    arrive();
    await(deadline, call, what);
  }

  /// The two parts of sync(): the first waits for nobody.
  void arrive();
  void await(Deadline deadline, uint64_t call, const std::function<std::string()>& what);

 private:
  bool arrived(int rank, uint32_t number) const;
  void look_around(Deadline deadline, uint64_t call, const std::function<std::string()>& what, Awaited& awaited);

  NodeSession& session_;
  uint32_t epoch_ = 0;  // number of the last synchronisation; wraps, so only differences count
};

}  // namespace ours
