#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/node/node_session.h"

namespace ours {

/// Signals between the ranks of a node, in the signal pads of their symmetric memory. Each channel has a word for every
/// pair of ranks, in the pad of the receiver: 1 while a signal is there that has not been taken. The words are laid out
/// as torch lays them out on GPUs, so a program may use the rest of a pad for itself.
///
/// Throws InvalidArgument for a channel or a rank that does not exist; PeerError if the peer has died or left, which
/// fails the session for all ranks; TimeoutError. Threads may use different channels at the same time.
class SignalPads {
 public:
  /// `pads`: of each rank, `pad_bytes` bytes long.
  SignalPads(std::shared_ptr<NodeSession> session, std::vector<std::byte*> pads, size_t pad_bytes)
      : session_(std::move(session)), pads_(std::move(pads)), pad_bytes_(pad_bytes) {}

  /// Waits until the last signal on that channel was taken, and sends one. After a timeout nothing has been sent.
  void put(int to, int64_t channel, std::chrono::milliseconds timeout);

  /// Waits for a signal and takes it. What `from` wrote before it sent the signal can be read then. After a timeout
  /// nothing has been taken.
  void wait(int from, int64_t channel, std::chrono::milliseconds timeout);

  /// Exchanges signals with all other ranks. A timeout fails the session, since some signals are under way then.
  void barrier(int64_t channel, std::chrono::milliseconds timeout);

 private:
  /// What is under way, for messages: "barrier (channel 0) on symmetric memory".
  struct Doing {
    const char* name;
    int64_t channel;
    Deadline deadline;
    bool fails_session;
    std::string text() const;
  };

  void check(int64_t channel, int peer) const;
  std::atomic<uint32_t>& word(int to, int from, int64_t channel) const;
  void put(int to, const Doing& doing);
  void wait(int from, const Doing& doing);
  /// Changes the word in `to`'s pad from `before` to `after`, once it is `before`. That takes `peer`.
  void change(int to, std::atomic<uint32_t>& word, uint32_t before, uint32_t after, int peer, const Doing& doing);

  const std::shared_ptr<NodeSession> session_;
  const std::vector<std::byte*> pads_;
  const size_t pad_bytes_;
};

}  // namespace ours
