#pragma once

#include <string>

#include "common/options.h"
#include "common/process_fd.h"
#include "common/socket_address.h"

namespace ours {

/// A socket that waits for connections at `address`, on a port of the range. Non-blocking. Throws SystemError that says
/// what was tried. Its connections have the congestion control of that name; empty: the system's.
ProcessFd listen_at(const SocketAddress& address, const PortRange& ports, const std::string& congestion = "");

/// Gives a socket the congestion control of that name; empty: leaves it. False, with errno, where it may not have it.
bool use_congestion_control(int fd, const std::string& name);

/// The address that a socket is bound to.
SocketAddress local_address(int fd);

/// A non-blocking socket whose connection to `address` has begun, with that congestion control; invalid, with errno,
/// where it could not begin.
ProcessFd begin_connecting(const SocketAddress& address, const std::string& congestion = "");

/// The next connection that waits at a listener, non-blocking; invalid if there is none.
ProcessFd accept_from(int listener);

/// Sends at once what it is given, and notices when the other machine is gone, unless data is under way.
void tune_connection(int fd);

/// Gives up, too, when what was sent finds no acknowledgement for long. Not for connections whose receiver may let the
/// sender wait: to the system, a peer that takes nothing for so long is gone as well.
void limit_silence(int fd);

}  // namespace ours
