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
  int rank = -1;
  for (Arrived& arrived : header.last) {
    rank = arrivals_->last(rank);
    if (rank < 0) return;
    const int64_t ago = std::clamp<int64_t>(now - arrivals_->at(rank), 0, UINT32_MAX);
    arrived = {static_cast<uint32_t>(rank), static_cast<uint32_t>(ago)};
  }
}

void TcpLateness::hear(int peer, const FrameHeader& header) {
  constexpr int64_t kBeforeThisRank = -1;
  if (arrivals_ == nullptr) return;
  if (!began_) {
    note(static_cast<uint32_t>(peer), kBeforeThisRank);
    for (const Arrived& arrived : header.last) note(arrived.rank, kBeforeThisRank);
  } else if (idle_) {
    const int64_t now = microseconds_since(called_);
    for (const Arrived& arrived : header.last) note(arrived.rank, now - int64_t{arrived.us_ago});
  }
}

void TcpLateness::note(uint32_t rank, int64_t at) {
  // Headers come from outside.
  const bool is_other = rank < static_cast<uint32_t>(size_) && rank != static_cast<uint32_t>(own_rank_);
  if (is_other) arrivals_->note(static_cast<int>(rank), at);
}

}  // namespace ours
