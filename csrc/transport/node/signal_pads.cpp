#include "transport/node/signal_pads.h"

#include "common/error.h"
#include "transport/node/peer_wait.h"
#include "transport/wait.h"

namespace ours {

std::string SignalPads::Doing::text() const {
  return std::string(name) + " (channel " + std::to_string(channel) + ") on symmetric memory";
}

void SignalPads::put(int to, int64_t channel, std::chrono::milliseconds timeout) {
  check(channel, to);
  put(to, {"put_signal", channel, Deadline::after(timeout), false});
}

void SignalPads::wait(int from, int64_t channel, std::chrono::milliseconds timeout) {
  check(channel, from);
  wait(from, {"wait_signal", channel, Deadline::after(timeout), false});
}

void SignalPads::barrier(int64_t channel, std::chrono::milliseconds timeout) {
  const int rank = session_->rank();
  const int size = session_->size();
  check(channel, rank);
  const Doing doing{"barrier", channel, Deadline::after(timeout), true};
  // Every rank begins with its next neighbour, so that they do not all write into the same pad.
  for (int i = 1; i < size; ++i) put((rank + i) % size, doing);
  for (int i = 1; i < size; ++i) wait((rank + i) % size, doing);
}

void SignalPads::check(int64_t channel, int peer) const {
  const auto channels = static_cast<int64_t>(pad_bytes_ / sizeof(uint32_t) / pads_.size());
  if (channel < 0 || channel >= channels) {
    throw InvalidArgument("channel " + std::to_string(channel) + ": a signal pad of " + std::to_string(pad_bytes_) +
                          " bytes has the channels 0 to " + std::to_string(channels - 1) + " for " +
                          std::to_string(pads_.size()) + " ranks; set_signal_pad_size() makes larger ones");
  }
  if (peer < 0 || peer >= session_->size()) {
    throw InvalidArgument("rank " + std::to_string(peer) + " is not one of the " + std::to_string(session_->size()) +
                          " ranks of the symmetric memory");
  }
}

std::atomic<uint32_t>& SignalPads::word(int to, int from, int64_t channel) const {
  const size_t number = static_cast<size_t>(channel) * pads_.size() + static_cast<size_t>(from);
  return reinterpret_cast<std::atomic<uint32_t>*>(pads_[static_cast<size_t>(to)])[number];
}

void SignalPads::put(int to, const Doing& doing) {
  change(to, word(to, session_->rank(), doing.channel), 0, 1, to, doing);
}

void SignalPads::wait(int from, const Doing& doing) {
  change(session_->rank(), word(session_->rank(), from, doing.channel), 1, 0, from, doing);
}

void SignalPads::change(int to, std::atomic<uint32_t>& word, uint32_t before, uint32_t after, int peer,
                        const Doing& doing) {
  // All threads that wait for a word in a rank's pad sleep on the doorbell of that rank.
  await_peer(*session_, to, {peer, [&doing] { return doing.text(); }, doing.deadline, doing.fails_session}, [&] {
    uint32_t seen = before;
    // Acquire and release: what the sender wrote before it is read after it. Sequentially consistent for wait_on().
    return word.compare_exchange_strong(seen, after, std::memory_order_seq_cst);
  });
  signal(session_->block(to).doorbell);
}

}  // namespace ours
