#pragma once

#include <vector>

#include "transport/tcp/tcp_stream.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// How two ranks agree to close the connections between them, so that a group that nobody uses takes no descriptors.
///
/// Each tells the other what it has sent and received, and keeps back what it posts until it has heard the same from
/// the other. If nothing is under way, both close; the connection for control is closed once the other side has ended
/// it, too, so that nothing is lost that is said meanwhile, such as that the group has failed. Otherwise both go on.
/// Nobody waits: what is kept back goes out on the old connections or on new ones. Used with the mesh's lock held.
class TcpParking {
 public:
  /// Those to one peer, control first.
  using Streams = std::vector<TcpStream*>;

  /// Says that this rank would close the connections, if nothing is under way as far as it knows. `card` says where
  /// this rank can be reached. Returns whether it did.
  bool offer(const Streams& streams, const TcpCard& card);
  /// The peer would close them (`willing`), or would not. `idle`: so would this rank.
  void hear(const Streams& streams, const ParkNotice& theirs, bool willing, bool idle, const TcpCard& card);
  /// This rank has something to say that must not be kept back: takes an offer back, or closes at once what both would
  /// close. Returns whether they are closed.
  bool cut_short(const Streams& streams);
  /// Goes on with what was agreed. Returns true once all connections are closed.
  bool advance(const Streams& streams);

  /// Whether the peer may have closed connections, and will not take new ones before it is known.
  bool is_under_way() const { return state_ != State::None; }
  /// Whether both have agreed to close the connections.
  bool is_agreed() const { return state_ > State::Offered; }

 private:
  enum class State { None, Offered, Agreed, Ending };

  void say(const Streams& streams, bool willing);
  void go_on(const Streams& streams);
  void end(const Streams& streams);

  State state_ = State::None;
  ParkNotice own_;  ///< the last one
};

}  // namespace ours
