#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/group_failure.h"
#include "transport/tcp/tcp_acceptor.h"
#include "transport/tcp/tcp_addresses.h"
#include "transport/tcp/tcp_attempt.h"
#include "transport/tcp/tcp_congestion.h"
#include "transport/tcp/tcp_parking.h"
#include "transport/tcp/tcp_poller.h"

namespace ours {

/// The connections of one rank to its peers: for each peer one for control and some for data. A rank that needs a peer
/// connects to it and tries its addresses in turn. The peer may do so at the same time; then the lower rank insists on
/// its own attempt and the higher one, which begins a moment later, gives up its own. Used with the mesh's lock held.
/// Connections that nobody uses can be closed (TcpParking), and are made again when they are needed.
class TcpConnections final : private TcpAcceptor::Host {
 public:
  /// Takes the frames that arrive, and learns what becomes of the connections.
  class Owner : public TcpStream::Handler {
   public:
    /// The control connection to that rank is open.
    virtual void opened(int rank) = 0;
    /// Whether that rank has been told all that it must hear of the group's failure.
    virtual bool is_done_with(int rank) const = 0;
    /// The rank cannot be reached, or died. Throws.
    virtual void lost(int rank, const std::string& how) = 0;
    /// Nothing can be connected any more. Throws.
    virtual void raise(FailureKind kind, const std::string& message) = 0;
  };

  /// Listens; `card` gets the addresses. Throws Error.
  TcpConnections(const TcpSelf& self, const TcpConfig& config, const GroupFailure& failure, TcpPoller& poller,
                 Owner& owner, TcpCard& card);

  /// `self` has got its secret and its number of streams: from now on there may be connections.
  void begin() { acceptor_.admit(self_); }

  /// The ranks to which there are streams, open or not.
  const std::vector<int>& met() const { return met_; }
  TcpStream& control(int rank) { return stream(rank, 0); }
  /// The data stream of that number to `rank`.
  TcpStream& data(int rank, size_t number) { return stream(rank, 1 + static_cast<int>(number)); }
  size_t data_streams() const { return static_cast<size_t>(self_.streams) - 1; }

  /// The number of open connections, including those for control.
  size_t count() const { return open_.size(); }
  bool is_needed(int rank) { return peer(rank).needed; }
  /// Whether need() needs no card, since there are connections, or have been.
  bool is_known(int rank);
  /// This rank needs the peer, and connects to it at the addresses of its card unless it is connected already.
  void need(int rank);
  void need(int rank, const TcpCard& card);
  /// The addresses that were tried in vain, and why; empty if there are none.
  std::string tried(int rank) const;

  /// Moves handshakes and all streams as far as possible. Returns true if anything moved.
  bool advance();
  bool advance_handshakes();
  bool anything_ready() const;
  /// Whether a peer has yet to get something that was posted for control.
  bool owes_control(int rank) const;
  /// Sends what was posted for control. Returns false while the system has not taken all that this rank's peers
  /// should get.
  bool flush_control();
  /// Calls body(rank, control stream) for all control streams that can still send.
  void for_each_control(const std::function<void(int, TcpStream&)>& body);
  /// Offers to close the connections that are not in use. Returns the number of those that may be closed soon.
  size_t park();
  /// A peer offers that, or answers. `idle`: this rank does not use them.
  void hear_park(int rank, const FrameHeader& header, const std::string& notice, bool idle);
  /// There is something to say that must not be kept back: takes the offers back, and closes at once what both would
  /// close.
  void end_parking();
  /// The number of connections that may be closed soon.
  size_t parking() const { return parking_.size() * static_cast<size_t>(self_.streams); }
  /// Looks at the connections whose congestion control may still change.
  void settle_congestion();
  /// Drops all references to memory of callers.
  void forget();
  void close() noexcept;

  void said_farewell(int rank, std::string reason);
  /// When the rank said farewell, if it has.
  std::optional<Clock::time_point> left(int rank) const;
  /// The reason why nothing new will come from that rank ("died, or its machine became unreachable"); null while
  /// something may.
  const char* absence(int rank) const;
  /// Why that rank, which has left, may have done so, as the end of an error (see describe_reason()).
  std::string reason(int rank) const;
  /// Tells the owner if the rank died, or will not send or take what this rank waits for: what is posted on its data
  /// streams, something on the control connection (`awaited`), or data for which nothing is posted, which begin on the
  /// first of the data streams (`expected`).
  void check(int rank, bool awaited, bool expected);
  /// Tells the owner if a rank does not answer on a data stream, whose link may be another one than that of the
  /// control connection. Looks once a second.
  void check_links();
  /// Whether something is posted on a data stream.
  bool has_posted(int rank) const;

  void introduce(std::vector<std::string> names) { names_ = std::move(names); }
  /// "rank 2 (host node1, pid 4711)", as far as it is known.
  std::string describe(int rank) const;

 private:
  struct Slot {
    Slot(int rank, int number, TcpStream::Handler& handler)
        : rank(rank), number(number), stream(rank, number > 0, handler) {}
    const int rank;
    const int number;  ///< 0 is for control
    TcpStream stream;
    std::unique_ptr<TcpAttempt> attempt;
    bool inbound = false;  ///< a handshake that the peer began was admitted
  };
  struct Peer {
    std::vector<std::unique_ptr<Slot>> slots;  ///< control first
    TcpAddresses addresses;
    bool needed = false;          ///< by this rank, which connects if the peer does not
    TcpParking::Streams streams;  ///< those of the slots
    TcpParking parking;
    std::optional<Clock::time_point> left;
    std::string reason;                       ///< that it gave when it left
    std::optional<Clock::time_point> broken;  ///< when a data stream was found to have ended
  };

  bool is_undecided(const TcpHandshake& handshake) override;
  bool admit(TcpHandshake& handshake) override;
  void admitted(TcpHandshake& handshake, bool done) override;
  /// Makes the lack of descriptors the failure of the group. In a group that has already failed, frees a descriptor
  /// if it can, so that one more peer can hear of the failure.
  bool lacks_descriptors(const std::string& purpose, int error) override;

  Peer& peer(int rank);
  const Peer* find(int rank) const { return peers_[static_cast<size_t>(rank)].get(); }
  bool spare_descriptor();
  Slot& slot(int rank, int stream) { return *peer(rank).slots[static_cast<size_t>(stream)]; }
  TcpStream& stream(int rank, int stream) { return slot(rank, stream).stream; }
  void begin_missing(int rank);
  bool advance_parking();
  void drop_closed();
  /// The connections to that rank are closed, and are made again if somebody needs them.
  void parted(int rank);
  bool advance_attempts();
  bool advance_attempt(Slot& slot);
  bool begin_attempt(Slot& slot);
  void try_next(Slot& slot, const std::string& reason, bool refused);
  void open(Slot& slot, TcpHandshake& handshake);

  const TcpSelf& self_;
  const TcpCard& card_;
  const GroupFailure& failure_;
  TcpPoller& poller_;
  Owner& owner_;
  const TcpCongestion congestion_;
  const std::chrono::milliseconds unanswered_;
  TcpAcceptor acceptor_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::string> names_;  ///< of all ranks, "(host node1, pid 4711)" each; or empty
  std::vector<int> met_;
  std::vector<Slot*> open_;            ///< those with an open stream
  std::vector<int> parking_;           ///< the ranks to which they may be closed soon, and perhaps others
  std::vector<Slot*> attempts_;        ///< those with an attempt, and perhaps some that had one
  std::vector<TcpStream*> unsettled_;  ///< open streams whose congestion control may change
  Clock::time_point next_look_{};      ///< at the links
};

}  // namespace ours
