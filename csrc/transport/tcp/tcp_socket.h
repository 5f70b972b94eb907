#pragma once

#include <chrono>
#include <string>

#include "common/options.h"
#include "common/process_fd.h"
#include "common/socket_address.h"

namespace ours {

/// The system's words for an errno.
std::string text_of_error(int error);

/// Returns a non-blocking socket that listens at `address`, on a port of the range. Its connections have the
/// congestion control of that name, or the system's if it is empty. Throws a SystemError that says what was tried.
ProcessFd listen_at(const SocketAddress& address, const PortRange& ports, const std::string& congestion = "");

/// Returns a socket that receives UDP packets at `address`, on a port of the range. Throws SystemError.
ProcessFd receive_at(const SocketAddress& address, const PortRange& ports);

/// Gives a socket the congestion control of that name, or leaves it if the name is empty. Returns false, with errno,
/// if the socket may not have it.
bool use_congestion_control(int fd, const std::string& name);

/// The address that a socket is bound to.
SocketAddress local_address(int fd);

/// Returns a non-blocking socket that has begun to connect to `address`, with that congestion control; invalid, with
/// errno, if it could not.
ProcessFd begin_connecting(const SocketAddress& address, const std::string& congestion = "");

/// Accepts the next connection that waits at a listener, non-blocking; invalid if there is none.
ProcessFd accept_from(int listener);

/// Lets a connection send at once what it is given, and notice that the other machine is gone unless data is under
/// way.
void tune_connection(int fd);

/// Lets a connection also give up when what was sent is not acknowledged for `limit`. Not for connections whose
/// receiver may hold the sender back: to the system, a peer that takes nothing for that long is gone as well.
void limit_silence(int fd, std::chrono::milliseconds limit);

/// Whether something was sent on a connection, and for `limit` nothing has come in answer. Also for connections whose
/// receiver may hold the sender back, since it answers when it is asked whether it still does.
bool is_unanswered(int fd, std::chrono::milliseconds limit);

}  // namespace ours
