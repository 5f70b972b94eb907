#include "transport/node/signal_counters.h"

#include <string>

#include "transport/node/peer_wait.h"
#include "transport/wait.h"

namespace ours {

std::atomic<uint32_t>& SignalCounters::word(int to, int from) const {
  return reinterpret_cast<std::atomic<uint32_t>*>(words_[static_cast<size_t>(to)])[from];
}

void SignalCounters::send(int to) {
  // Release: the receiver reads what was written before. Sequentially consistent for wait_on().
  word(to, session_->rank()).fetch_add(1, std::memory_order_seq_cst);
  signal(session_->block(to).doorbell);
}

bool SignalCounters::take(int from) {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint32_t& taken = taken_[static_cast<size_t>(from)];
  if (word(session_->rank(), from).load(std::memory_order_seq_cst) == taken) return false;
  ++taken;
  return true;
}

void SignalCounters::wait(int from, std::chrono::milliseconds timeout) {
  const PeerWait wait{from, [] { return std::string("wait_signal of a window"); }, Deadline::after(timeout), false};
  await_peer(*session_, session_->rank(), wait, [&] { return take(from); });
}

}  // namespace ours
