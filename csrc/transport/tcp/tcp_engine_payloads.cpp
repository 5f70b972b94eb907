#include "transport/tcp/tcp_engine_payloads.h"

#include <exception>

namespace ours {

namespace {

constexpr const char* kSend = "send to";
constexpr const char* kReceive = "receive from";

}  // namespace

TcpEnginePayloads::Announcement TcpEnginePayloads::send(int peer, const void* data, size_t bytes, size_t* done) {
  Queue& queue = out_[peer];
  queue.last = next(queue.last);
  Transfer& sent = begin(queue, peer, kSend, done, [&] { return engine_->send(peer, queue.last, data, bytes); });
  sent.has_frame = true;
  return {queue.last, &sent.frame};
}

bool TcpEnginePayloads::receive(int peer, uint32_t number, void* to, size_t bytes, size_t* done) {
  Queue& queue = in_[peer];
  if (number != next(queue.last)) return false;
  queue.last = number;
  begin(queue, peer, kReceive, done, [&] { return engine_->receive(peer, number, to, bytes); });
  return true;
}

TcpEnginePayloads::Transfer& TcpEnginePayloads::begin(Queue& queue, int peer, const char* what, size_t* done,
                                                      const Begin& begin) {
  queue.moved = Clock::now();
  queue.transfers.push_back({nullptr, done, false});
  ++under_way_;
  Transfer& transfer = queue.transfers.back();
  // After a fault the engine may be in any state, and the group is about to fail.
  if (fault_) return transfer;
  try {
    transfer.transfer = begin();
  } catch (const std::exception& e) {
    fail(peer, what, e.what());
  }
  return transfer;
}

bool TcpEnginePayloads::advance() {
  if (under_way_ == 0 || fault_) return false;
  bool moved = false;
  for (auto& [peer, queue] : out_) moved = advance(queue, peer, kSend) || moved;
  for (auto& [peer, queue] : in_) moved = advance(queue, peer, kReceive) || moved;
  return moved;
}

bool TcpEnginePayloads::advance(Queue& queue, int peer, const char* what) {
  bool moved = false;
  while (!queue.transfers.empty() && !fault_) {
    Transfer& first = queue.transfers.front();
    if (first.has_frame && first.frame == 0) break;
    try {
      if (!first.transfer->done()) break;
    } catch (const std::exception& e) {
      fail(peer, what, e.what());
      break;
    }
    ++*first.done;
    queue.transfers.pop_front();
    --under_way_;
    moved = true;
  }
  if (moved) queue.moved = Clock::now();
  return moved;
}

void TcpEnginePayloads::fail(int peer, const char* what, const char* why) {
  fault_ = Fault{peer, engine_->name() + " cannot " + what, why, Clock::now()};
}

bool TcpEnginePayloads::waits_for(int peer) const {
  const auto waits = [peer](const std::map<int, Queue>& queues) {
    const auto found = queues.find(peer);
    return found != queues.end() && !found->second.transfers.empty();
  };
  return waits(out_) || waits(in_);
}

Clock::time_point TcpEnginePayloads::last_moved(int peer) const {
  const auto moved = [peer](const std::map<int, Queue>& queues) {
    const auto found = queues.find(peer);
    return found == queues.end() ? Clock::time_point{} : found->second.moved;
  };
  return std::max(moved(out_), moved(in_));
}

void TcpEnginePayloads::forget() noexcept {
  for (auto* queues : {&out_, &in_}) {
    for (auto& one : *queues) one.second.transfers.clear();
  }
  under_way_ = 0;
}

}  // namespace ours
