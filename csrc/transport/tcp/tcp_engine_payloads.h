#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/deadline.h"
#include "transport/engine.h"

namespace ours {

/// Payloads of at least this many bytes travel by the group's engine, if it has one. Smaller ones arrive sooner with
/// the frame that announces them. The same on all ranks.
constexpr size_t kLeastEngineBytes = 4096;

/// The payloads that an engine moves. To each peer, and from each, they are done in the order in which they were
/// begun. If the engine fails, nothing is thrown, because the endpoint may be about to hear of the cause.
class TcpEnginePayloads {
 public:
  struct Fault {
    int peer;
    std::string text;  ///< "gloo cannot send to", to be followed by the peer
    std::string why;
    Clock::time_point since;
  };

  TcpEnginePayloads(std::shared_ptr<Engine> engine, size_t least_bytes)
      : engine_(std::move(engine)), least_bytes_(std::max<size_t>(least_bytes, 1)) {}

  /// Whether a payload of that size goes by the engine.
  bool takes(size_t bytes) const { return bytes >= least_bytes_; }

  /// The frame that announces a payload to be sent: its number, and the counter to increment when the system has the
  /// frame.
  struct Announcement {
    uint32_t number;
    size_t* through;
  };

  /// Increments *done when the payload may be used again and the frame was sent.
  Announcement send(int peer, const void* data, size_t bytes, size_t* done);

  /// Increments *done when everything has arrived. Returns false, and does nothing, if `number` is not the next one.
  bool receive(int peer, uint32_t number, void* to, size_t bytes, size_t* done);

  /// Returns true if anything was done.
  bool advance();

  bool any() const { return under_way_ != 0; }
  /// Whether something moves only when advance() is called.
  bool needs_calls() const { return any() && engine_->polls(); }
  bool waits_for(int peer) const;
  /// When something was last begun or done to or from the peer.
  Clock::time_point last_moved(int peer) const;
  const std::optional<Fault>& fault() const { return fault_; }

  /// Ends all transfers; their memory is not touched any more.
  void forget() noexcept;
  /// Closes the engine for good. Never waits for peers.
  void close() noexcept { engine_->close(); }

 private:
  struct Transfer {
    std::unique_ptr<Engine::Transfer> transfer;  ///< null if the engine failed to begin it
    size_t* done;
    bool has_frame;
    size_t frame = 0;  ///< counted up when it is sent
  };
  struct Queue {
    uint32_t last = 0;  ///< number of the message begun last
    Clock::time_point moved{};
    // A deque, since a transfer that was announced must keep its address.
    std::deque<Transfer> transfers;
  };
  using Begin = std::function<std::unique_ptr<Engine::Transfer>()>;

  /// Skips 0, which says in a header that the payload follows.
  static uint32_t next(uint32_t number) { return number + 1 == 0 ? 1 : number + 1; }
  Transfer& begin(Queue& queue, int peer, const char* what, size_t* done, const Begin& begin);
  bool advance(Queue& queue, int peer, const char* what);
  void fail(int peer, const char* what, const char* why);

  const std::shared_ptr<Engine> engine_;
  const size_t least_bytes_;
  std::map<int, Queue> out_;
  std::map<int, Queue> in_;
  size_t under_way_ = 0;
  std::optional<Fault> fault_;
};

}  // namespace ours
