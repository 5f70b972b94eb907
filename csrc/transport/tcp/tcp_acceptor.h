#pragma once

#include <list>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_poller.h"

namespace ours {

/// Listens for peers, and does the handshakes with the processes that connect, which are strangers until they have
/// proved otherwise. There is room for all connections that the group can have and some more. When it is taken, a
/// stranger that has said nothing for a while makes way for the next one, and the others wait in the system's queue.
class TcpAcceptor {
 public:
  /// Decides about the peers that connect.
  class Host {
   public:
    virtual ~Host() = default;
    /// A peer has proved its identity. Returns false to refuse this connection.
    virtual bool admit(TcpHandshake& handshake) = 0;
    /// The handshake of a peer that was admitted is over; `done` says whether it succeeded.
    virtual void admitted(TcpHandshake& handshake, bool done) = 0;
    /// There is no descriptor for the next connection. Returns true if there may be one now.
    virtual bool lacks_descriptors(const std::string& purpose, int error) = 0;
  };

  TcpAcceptor(const TcpSelf& self, TcpPoller& poller, Host& host) : self_(self), poller_(poller), host_(host) {}

  /// Listens at the addresses of the interfaces that `config` asks for, and returns them. Throws Error.
  std::vector<SocketAddress> listen(const TcpConfig& config, const std::string& congestion);

  /// Accepts connections and goes on with their handshakes, without waiting. Returns true if one of them ended.
  bool advance();

  /// Ends the connection of the stranger that has been here for longest, and has proved nothing. Returns false if there
  /// is none.
  bool send_stranger_away();

  void close();

 private:
  struct Incoming {
    TcpHandshake handshake;
    Clock::time_point arrived;
  };

  void accept_from_queue(int listener);
  bool has_room();
  std::list<Incoming>::iterator oldest_stranger();

  const TcpSelf& self_;
  TcpPoller& poller_;
  Host& host_;
  std::vector<ProcessFd> listeners_;
  std::list<Incoming> incoming_;
  bool queue_left_ = false;  ///< some connections could not be accepted yet
};

}  // namespace ours
