#pragma once

#include <string>
#include <vector>

#include "common/options.h"
#include "common/siphash.h"
#include "common/socket_address.h"

// The roll call between machines (see common/whereabouts.h for that within one). A process answers on UDP ports, from a
// thread of its own, whoever proves to know its key. A question or an answer that is lost is a process that did not
// say where it is.

namespace ours {

/// Where a process can be asked from other machines; without addresses, nobody can.
struct AskedPeer {
  SipKey key{};
  std::vector<SocketAddress> addresses;  ///< with ports
};

/// This process. Opens a port of the range at each of those addresses and starts the thread, unless an earlier call
/// has. If it cannot, nobody can ask.
AskedPeer own_tcp_whereabouts(const std::vector<SocketAddress>& addresses, const PortRange& ports);

/// What each of the processes answers, or why it does not, as the end of a sentence. Takes at most kAskingTime.
std::vector<std::string> ask_tcp_whereabouts(const std::vector<AskedPeer>& peers);

}  // namespace ours
