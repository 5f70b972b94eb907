#include "transport/tcp/tcp_lateness.h"

#include <algorithm>

namespace ours {

namespace {

int64_t microseconds(Clock::duration time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

uint32_t fitting(int64_t time) { return static_cast<uint32_t>(std::clamp<int64_t>(time, 0, UINT32_MAX)); }

}  // namespace

void TcpLateness::begin(Arrivals* arrivals, Clock::time_point called) {
  arrivals_ = arrivals;
  called_ = called;
  idle_since_.reset();
  for (auto& [rank, peer] : peers_) {
    peer.waited_before = peer.waited;
    peer.waits_before = peer.waits;
    peer.waited = peer.waits = 0;
    peer.heard = false;
  }
}

void TcpLateness::stamp(int peer, FrameHeader& header) {
  if (arrivals_ == nullptr) return;
  const int64_t now = microseconds(Clock::now() - called_);
  int rank = -1;
  for (Arrived& arrived : header.last) {
    rank = arrivals_->last(rank);
    if (rank < 0) break;
    arrived = {static_cast<uint32_t>(rank), fitting(now - arrivals_->at(rank))};
  }
  header.us_waited = fitting(peers_[peer].waited_before);
}

void TcpLateness::hear(int peer, const FrameHeader& header, int own, int size) {
  if (arrivals_ == nullptr) return;
  hear_link(peer, header);
  if (!idle_since_) return;
  const auto now = Clock::now();
  Peer& sender = peers_[peer];
  sender.waited += microseconds(now - *idle_since_);
  ++sender.waits;
  idle_since_ = now;
  for (const Arrived& arrived : header.last) {
    if (arrived.rank >= static_cast<uint32_t>(size) || arrived.rank == static_cast<uint32_t>(own)) continue;
    arrivals_->note(static_cast<int>(arrived.rank),
                    microseconds(now - called_) - int64_t{arrived.us_ago} - sender.transit);
  }
}

void TcpLateness::hear_link(int peer, const FrameHeader& header) {
  Peer& sender = peers_[peer];
  if (sender.heard) return;
  sender.heard = true;
  const int64_t link = std::min(sender.waited_before, int64_t{header.us_waited});
  arrivals_->note_link(peer, link);
  // An average over some calls, since each of them may have been disturbed.
  constexpr int64_t kCalls = 4;
  sender.transit += (link / std::max<int64_t>(sender.waits_before, 1) - sender.transit) / kCalls;
}

}  // namespace ours
