#include "collectives/node/shared_write.h"

#include <algorithm>
#include <limits>

#include "kernels/reduce.h"

namespace ours {

namespace {

/// How many bytes go the way that is not in use when it is tried. Several pieces, of which the cheapest counts, since
/// others may have been interrupted.
constexpr size_t kTryBytes = 4 * WriteTimes::kTimedBytes;

/// A try may cost six times as much. Between two of them there is at least this time, and at least so many bytes go the
/// way in use.
constexpr std::chrono::milliseconds kTryEvery{5};
constexpr size_t kBytesBetween = 32 * kTryBytes;

/// How many times as fast the way around the cache must be. Between caches it is one and a third to three times as
/// fast. Under one cache it is slower, or a few per cent faster at the cost of the readers, which find the data in
/// memory only.
constexpr double kWorthIt = 1.2;

}  // namespace

bool WriteTimes::next(bool around, Clock::time_point now) {
  if (around != around_) known_ = to_try_ = since_try_ = 0;
  around_ = around;
  if (to_try_ == 0 && known_ >= kKept && since_try_ >= kBytesBetween && now >= next_try_) {
    to_try_ = kTryBytes;
    cheapest_try_ = std::numeric_limits<double>::infinity();
    next_try_ = now + kTryEvery;
  }
  return around != (to_try_ > 0);
}

void WriteTimes::took(size_t bytes, Clock::duration time) {
  const double cost = std::chrono::duration<double, std::nano>(time).count() / static_cast<double>(bytes);
  if (to_try_ == 0) {
    costs_[known_++ % kKept] = cost;
    since_try_ += bytes;
    return;
  }
  cheapest_try_ = std::min(cheapest_try_, cost);
  to_try_ -= std::min(bytes, to_try_);
  if (to_try_ > 0) return;
  const double cheapest = *std::min_element(costs_, costs_ + kKept);
  around_is_faster_ = around_ ? cheapest_try_ >= kWorthIt * cheapest : cheapest >= kWorthIt * cheapest_try_;
  known_ = since_try_ = 0;  // what is compared next is to be as new as the next try
}

SharedWrite::SharedWrite(NodeSession& session, Setting around)
    : session_(session), setting_(around), around_(around == Setting::On) {}

void SharedWrite::begin() {
  if (setting_ != Setting::Auto) return;
  around_ = false;
  for (int r = 0; r < session_.size(); ++r) {
    around_ = around_ || session_.block(r).around_is_faster.load(std::memory_order_relaxed);
  }
}

void SharedWrite::copy(void* to, const void* from, size_t bytes) {
  times_.time(setting_, around_, bytes, [&](bool around) { copy_bytes(to, from, bytes, around); });
  std::atomic<bool>& said = session_.self().around_is_faster;
  if (said.load(std::memory_order_relaxed) != times_.around_is_faster()) {
    said.store(times_.around_is_faster(), std::memory_order_relaxed);
  }
}

}  // namespace ours
