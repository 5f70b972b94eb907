#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/joining/store_keys.h"
#include "backend/trouble.h"
#include "common/error.h"
#include "transport/node/node_probe.h"
#include "transport/node/node_session.h"
#include "transport/topology.h"

namespace ours {

/// Who is to meet, and where.
struct Meeting {
  StorePtr store;
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string group;      ///< for messages
  std::string selection;  ///< rules of the table of algorithms; empty: those of OURS_SELECT
};

/// One attempt of the ranks of a new group to come together. All ranks make the same calls in the same order. All throw
/// the same Error if one of them says fail(), PeerError if one dies (see Trouble), and TimeoutError that names the
/// absent ranks after the timeout, whether or not the store answers.
///
/// Keys: a counter for each rank, which keeps the attempts apart, so that a store can serve again after a group was
/// destroyed; and for each attempt one a rank and one a rank and step, one a node, two a machine, and at most one
/// error.
class Rendezvous {
 public:
  explicit Rendezvous(const Meeting& meeting);

  /// Finds out which ranks share memory. That they do is proved, not assumed: each rank has read a random number in the
  /// memory of its node's leader. Ranks that cannot, though all looks alike, are nodes of their own.
  Topology find_topology();

  /// Makes the memory of this rank's node; returns when all ranks of the node have attached. The session's ranks are
  /// those of the node, in their order. `rules`: of the table of algorithms, from the node's leader.
  std::shared_ptr<NodeSession> open_node(const Topology& topology, const std::string& rules);

  /// A store for this attempt alone, of which others know the `name`.
  StorePtr store(const std::string& name) const;
  /// Keys of this attempt alone, whose names begin with `name`.
  std::shared_ptr<StoreKeys> keys(const std::string& name) const;

  /// Returns when all ranks have called it with this `step`.
  void arrive(const std::string& step);

  /// Every rank leaves a word; rank 0 makes one out of all, which all get.
  std::string round(const std::string& step, const std::string& word,
                    const std::function<std::string(const std::vector<std::string>&)>& combine);

  /// Waits for keys that another rank sets, and keeps them; after the timeout throws TimeoutError with `late()`.
  void fetch(StoreKeys& keys, const std::vector<std::string>& names, const std::function<std::string()>& late);

  /// Makes all ranks throw the first error that any of them reports. Returns that one; where the store does not answer,
  /// `message`.
  std::string report(const std::string& message);
  [[noreturn]] void fail(const std::string& message) { throw Error(report(message)); }

  const Meeting& meeting() const { return meeting_; }
  /// Who the ranks are, "(host node1, pid 4711)" each, once there is a topology.
  const std::vector<std::string>& names() const { return names_; }
  Deadline deadline() const { return deadline_; }
  std::string describe_self() const;

 private:
  /// The rank whose memory this one has seen; itself where it is the first of its node.
  int find_leader(const NodeProbe& probe);

  /// What somebody sets. After the timeout throws `late()`.
  std::vector<std::string> await(const std::vector<std::string>& keys, const std::function<std::string()>& late);
  std::string absent(const std::string& step);
  /// Looks for trouble while this rank waits for something else than the store, now and then.
  void glance();
  StoreKeys::Terms terms() const;

  const Meeting meeting_;
  const Deadline deadline_;
  const std::string prefix_;
  const std::shared_ptr<Trouble> trouble_;
  StoreKeys keys_;
  std::vector<std::string> names_;
  Clock::time_point next_glance_{};
};

}  // namespace ours
