#pragma once

#include <list>
#include <memory>
#include <string>

#include "common/deadline.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_listener.h"
#include "transport/tcp/tcp_poller.h"

namespace ours {

/// Ends the handshakes of the peers of one mesh that connect to the process's listener.
class TcpAcceptor {
 public:
  /// Decides about the peers that connect.
  class Host {
   public:
    virtual ~Host() = default;
    /// Whether it cannot be said yet what to answer.
    virtual bool is_undecided(const TcpHandshake& handshake) = 0;
    /// A peer has proved its identity. Returns false if this rank insists on its own connection to it.
    virtual bool admit(TcpHandshake& handshake) = 0;
    /// The handshake of a peer that was admitted is over; `done` says whether it succeeded.
    virtual void admitted(TcpHandshake& handshake, bool done) = 0;
    /// There is no descriptor for the next connection. Returns true if there may be one now.
    virtual bool lacks_descriptors(const std::string& purpose, int error) = 0;
  };

  TcpAcceptor(TcpPoller& poller, Host& host) : poller_(poller), host_(host) {}
  TcpAcceptor(const TcpAcceptor&) = delete;
  TcpAcceptor& operator=(const TcpAcceptor&) = delete;
  ~TcpAcceptor() { close(); }

  /// Lets peers connect, and writes to `card` where. Throws Error.
  void listen(const TcpConfig& config, const std::string& congestion, TcpCard& card);
  /// Says whose peers these are.
  void admit(const TcpSelf& self) { listener_->admit(*place_, self); }

  /// Accepts connections and goes on with their handshakes, without waiting. Returns true if one of them ended.
  bool advance();

  /// Whether no handshake of a peer is under way.
  bool is_idle() const { return arrived_.empty() && incoming_.empty(); }

  /// Ends a connection whose other side has not proved who it is. Returns false if there is none.
  bool send_stranger_away() { return listener_ && listener_->send_stranger_away(); }

  /// Closes a descriptor that was kept for this. Returns false if there is none.
  bool give_up_spare() { return listener_ && listener_->give_up_spare(); }

  void close() noexcept;

 private:
  struct Incoming {
    TcpHandshake handshake;
    Clock::time_point arrived;
  };

  void serve();
  void answer_arrived();
  void answer(TcpHandshake& handshake);

  TcpPoller& poller_;
  Host& host_;
  std::shared_ptr<TcpListener> listener_;
  std::shared_ptr<TcpListener::Place> place_;
  std::list<TcpHandshake> arrived_;  ///< have proved who they are, and await a verdict
  std::list<Incoming> incoming_;     ///< have got it
};

}  // namespace ours
