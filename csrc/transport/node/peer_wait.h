#pragma once

#include <functional>
#include <string>

#include "transport/node/node_session.h"

namespace ours {

/// A wait for something that one rank of a node does in shared memory.
struct PeerWait {
  int peer;
  std::function<std::string()> what;  ///< is under way, for messages: "barrier (channel 0) on symmetric memory"
  Deadline deadline;
  bool fails_session;  ///< whether a timeout fails the session
};

/// Returns once ready() holds. Whoever makes that true rings the doorbell of the rank `bell`. Throws PeerError, which
/// fails the session for all ranks, if the peer has died or left, and TimeoutError.
void await_peer(NodeSession& session, int bell, const PeerWait& wait, const std::function<bool()>& ready);

}  // namespace ours
