#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/joining/join_monitor.h"
#include "backend/joining/store_keys.h"
#include "common/error.h"
#include "transport/failure_kind.h"
#include "transport/node/node_probe.h"
#include "transport/node/node_session.h"
#include "transport/topology.h"

namespace ours {

/// The ranks that are to meet, and where.
struct Meeting {
  StorePtr store;
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string group;      ///< the group's name in messages
  std::string selection;  ///< rules of the table of algorithms; empty: those of OURS_SELECT
};

/// An attempt of the ranks of a new group to come together. All ranks make the same calls in the same order. All of
/// them throw the same Error if one calls fail(), PeerError if one dies (see JoinMonitor), and, after the timeout of
/// the first, a TimeoutError that names the absent ranks, whether or not the store answers.
///
/// A counter for each rank in the store numbers the attempts, so that a store can be used again after a group was
/// destroyed.
class Rendezvous {
 public:
  explicit Rendezvous(const Meeting& meeting);

  /// Finds out which ranks share memory: a rank joins the first leader whose memory it can read (a random number there
  /// proves it), and leads a node of its own if there is none. Replaces `rules`, this rank's rules of the table of
  /// algorithms, with those of rank 0.
  Topology find_topology(std::string& rules);

  /// Makes the memory of this rank's node; returns when all ranks of the node have attached. The session's ranks are
  /// those of the node, in their order.
  std::shared_ptr<NodeSession> open_node(const Topology& topology);

  /// A store for this attempt alone, which all ranks open under the same `name`.
  StorePtr store(const std::string& name) const;
  /// Keys for this attempt alone, which begin with `name`.
  std::shared_ptr<StoreKeys> keys(const std::string& name) const;

  /// Returns when all ranks have called it with this `step`.
  void arrive(const std::string& step);

  /// An all-reduce through the store: `combine` makes one value from the values of all ranks, on rank 0, and all
  /// ranks return it.
  std::string round(const std::string& step, const std::string& value,
                    const std::function<std::string(const std::vector<std::string>&)>& combine);

  /// Makes all ranks throw the first error that any of them reports. Returns that error for JoinMonitor::raise(), or
  /// its own if the store does not answer.
  std::string report(FailureKind kind, const std::string& message);
  [[noreturn]] void fail(const std::string& message) { JoinMonitor::raise(report(FailureKind::System, message)); }

  const Meeting& meeting() const { return meeting_; }
  /// How to name the ranks, "(host node1, pid 4711)" each; known once there is a topology.
  const std::vector<std::string>& names() const { return names_; }
  Deadline deadline() const { return deadline_; }
  std::string describe_self() const;

 private:
  /// The first rank whose memory this rank can read; itself if it is the first of its node.
  int find_leader(const NodeProbe& probe);

  /// Waits for the values of `keys`. After the timeout, throws TimeoutError with the message `late()`.
  std::vector<std::string> await(const std::vector<std::string>& keys, const std::function<std::string()>& late);
  std::string absent(const std::string& step);
  /// Checks for a failed rank while this rank waits for something other than the store.
  void check_peers(bool at_once = false);
  StoreKeys::Terms terms() const;

  const Meeting meeting_;
  const Deadline deadline_;
  const std::string prefix_;
  const std::shared_ptr<JoinMonitor> monitor_;
  StoreKeys keys_;
  std::vector<std::string> names_;
  Clock::time_point next_check_{};
  bool store_is_silent_ = false;  // when it was last asked by check_peers()
};

}  // namespace ours
