#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/awaited.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// Counts the parts of messages that were posted, and those that are done.
struct Tally {
  size_t posted = 0;
  size_t done = 0;

  bool complete() const { return done == posted; }
};

/// One collective call of this rank. It numbers the call and checks that what arrives belongs to the same call on the
/// peers. It holds the mesh's lock while it lives, except in without_lock() and while run() sleeps. Buffers
/// and counters given to it must live until it is done with them or has ended: an engine whose threads need no lock may
/// still read what an error leaves behind, which is what keep() is for.
class TcpCall {
 public:
  using Facts = TcpCallState::Facts;

  /// One message, which travels in parts of at most plan().chunk_bytes. Both ends must describe it alike.
  struct Message {
    int peer;
    /// Tells the messages from one rank to another within a call apart. The receiver compares it with that of the
    /// receive that comes next; both ranks post their messages in the same order.
    uint16_t phase;
    size_t bytes;
    uint8_t detail = 0;  ///< to be seen by the receiver in next_from()
    uint32_t lane = 0;   ///< spreads messages of a single part, which would all use the first stream, over the streams
  };

  TcpCall(TcpMesh& mesh, Facts facts);
  TcpCall(const TcpCall&) = delete;
  TcpCall& operator=(const TcpCall&) = delete;
  ~TcpCall();

  /// The number of parts in which a message travels; at least one, so that an empty one is checked, too.
  size_t parts(size_t bytes) const;

  /// Posts the part or all parts; a part is done when the system has taken it.
  void send(const Message& message, const void* data, Tally& tally);
  void send_part(const Message& message, size_t part, const void* part_data, Tally& tally);

  /// Posts the part or all parts; a part is done when it has arrived. The number of a part determines its stream, on
  /// which it comes after those posted before.
  void receive(const Message& message, void* data, Tally& tally);
  void receive_part(const Message& message, size_t part, void* part_data, Tally& tally);

  /// The header of the next message from `peer` for which no receive was posted, once it has arrived; otherwise null.
  const FrameHeader* next_from(int peer);
  /// Whether this rank waits for next_from(peer).
  void expect(int peer, bool expected);

  /// Tells `to` that this rank is in the call and has come to `round`. This waits for no message, and no message
  /// waits for it. agreed() says whether `from` has told this rank so; it is asked about one round at a time, and
  /// about each rank once.
  void agree(uint32_t round, int to);
  bool agreed(uint32_t round, int from);

  /// Uninitialised memory that stays until nothing is moved to or from it any more, however the call ends. A local
  /// variable of a function that may throw does not live that long.
  std::byte* keep(size_t bytes);

  /// Makes sure that there will be a connection to `peer`.
  void reach(int peer);

  /// Moves what is posted until step() returns true. step() is called whenever something may have changed, and may
  /// post more. Sends what was agreed, too. Throws the group's failure.
  void run(const std::function<bool()>& step);

  /// Runs body(), which waits for something other than the mesh, without the lock.
  template <class Body>
  void without_lock(Body&& body) {
    {
      const WithoutLock without(lock_);
      body();
    }
    endpoint_.calls().set_absent({});
  }

  // ---- in without_lock()

  /// Moves what can be moved at once and throws the group's failure. `absent` are the ranks for which this rank
  /// waits; its neighbours are told of them when half of the time has passed.
  void look(const std::vector<uint32_t>& absent);
  /// The names of these ranks, for error messages.
  Culprits culprits(const std::vector<uint32_t>& ranks);

  // ---- at any time

  /// The same number on all ranks.
  uint64_t number() const { return endpoint_.calls().count(); }
  bool half_over() const { return Clock::now() >= facts_.deadline.half(); }
  /// The ranks for which this rank waits in the end.
  std::vector<uint32_t> causes() const { return endpoint_.causes(); }
  std::string what() const { return facts_.what(); }
  std::string describe(int rank) const { return mesh_.describe(rank); }

  /// Makes it the group's failure and tells the peers at once, because the process may end before any thread could.
  void fail(const std::exception_ptr& error) noexcept { endpoint_.fail(error); }
  [[noreturn]] void mismatch(const std::string& message) { endpoint_.raise(FailureKind::Mismatch, message); }

 private:
  FrameHeader header(const Message& message, size_t part) const;
  bool goes_by_engine(const FrameHeader& header) const;
  TcpStream& stream(const Message& message, size_t part);
  [[noreturn]] void time_out();
  /// Called when half of the time has passed: tells the neighbours, and other groups' ranks that ask, who is awaited.
  void declare_waiting();

  TcpMesh& mesh_;
  TcpEndpoint& endpoint_;
  const Facts facts_;
  TcpMesh::Lock lock_;
  std::vector<std::unique_ptr<std::byte[]>> kept_;
  Awaited awaited_;
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace ours
