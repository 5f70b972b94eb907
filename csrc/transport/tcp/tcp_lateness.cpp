#include "transport/tcp/tcp_lateness.h"

#include <algorithm>

namespace ours {

namespace {

int64_t microseconds_since(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - time).count();
}

}  // namespace

void TcpLateness::begin(Arrivals* arrivals, Clock::time_point called) {
  arrivals_ = arrivals;
  called_ = called;
  idle_ = began_ = false;
}

void TcpLateness::stamp(FrameHeader& header) const {
  if (arrivals_ == nullptr) return;
  const int64_t now = microseconds_since(called_);
  if (ended_) header.us_since_last_call = static_cast<uint64_t>(microseconds_since(*ended_));
  int rank = -1;
  for (Arrived& arrived : header.last) {
    rank = arrivals_->last(rank);
    if (rank < 0) return;
    const int64_t ago = std::clamp<int64_t>(now - arrivals_->at(rank), 0, UINT32_MAX);
    arrived = {static_cast<uint32_t>(rank), static_cast<uint32_t>(ago)};
  }
}

void TcpLateness::hear(const FrameHeader& header) {
  // Headers come from outside.
  constexpr uint64_t kLongest = std::chrono::microseconds(std::chrono::hours(24 * 365)).count();
  if (arrivals_ == nullptr) return;
  const int64_t now = microseconds_since(called_);
  int64_t sent = now;
  if (!began_) {
    if (!ended_ || header.us_since_last_call > kLongest) return;
    sent = std::min(now - microseconds_since(*ended_) + static_cast<int64_t>(header.us_since_last_call), now);
  } else if (!idle_) {
    return;
  }
  for (const Arrived& arrived : header.last) {
    const bool is_other =
        arrived.rank < static_cast<uint32_t>(size_) && arrived.rank != static_cast<uint32_t>(own_rank_);
    if (!is_other) continue;
    arrivals_->note(static_cast<int>(arrived.rank), sent - int64_t{arrived.us_ago});
  }
}

}  // namespace ours
