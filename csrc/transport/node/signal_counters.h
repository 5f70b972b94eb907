#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/node/node_session.h"

namespace ours {

/// Signals between the ranks of a node that are counted, so that a sender never waits: each rank has a word for every
/// sender, which counts all signals that it has ever sent. Safe to use from any thread.
class SignalCounters {
 public:
  static constexpr size_t kWordBytes = sizeof(std::atomic<uint32_t>);

  /// `words`: of each rank, as many words as there are ranks, zero at first.
  SignalCounters(std::shared_ptr<NodeSession> session, std::vector<std::byte*> words)
      : session_(std::move(session)), words_(std::move(words)), taken_(words_.size()) {}

  /// Sends a signal. What this rank wrote before can be read by the receiver once it has taken it.
  void send(int to);

  /// Takes a signal from that rank, if there is one.
  bool take(int from);

  /// Waits for a signal and takes it. Throws like await_peer(). After a timeout nothing has been taken.
  void wait(int from, std::chrono::milliseconds timeout);

 private:
  std::atomic<uint32_t>& word(int to, int from) const;

  const std::shared_ptr<NodeSession> session_;
  const std::vector<std::byte*> words_;
  std::mutex mutex_;
  std::vector<uint32_t> taken_;  // by sender; guarded by mutex_
};

}  // namespace ours
