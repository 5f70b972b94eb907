#include "collectives/node/shared_write.h"

#include <algorithm>
#include <limits>

#include "kernels/reduce.h"

namespace ours {

namespace {

/// Some pieces go the way that is not in use once in this time: they may cost six times as much.
constexpr std::chrono::milliseconds kTryEvery{5};

/// How many. The first ones find the lines where the other way has left them.
constexpr size_t kTries = 4;

/// How much faster the way around the cache must be. Between caches it is one and a half times as fast and more. Under
/// one cache it is slower, or a few per cent faster at the cost of the readers, which find the data in memory only.
constexpr double kWorthIt = 1.4;

}  // namespace

bool WriteTimes::next(bool around, Clock::time_point now) {
  if (around != around_) known_ = tries_left_ = 0;
  around_ = around;
  if (tries_left_ == 0 && known_ >= kKept && now >= next_try_) {
    tries_left_ = kTries;
    cheapest_try_ = std::numeric_limits<double>::infinity();
    next_try_ = now + kTryEvery;
  }
  return around != (tries_left_ > 0);
}

void WriteTimes::took(size_t bytes, Clock::duration time) {
  if (bytes < kTimedBytes) return;
  const double cost = std::chrono::duration<double, std::nano>(time).count() / static_cast<double>(bytes);
  if (tries_left_ == 0) {
    costs_[known_++ % kKept] = cost;
    return;
  }
  cheapest_try_ = std::min(cheapest_try_, cost);
  if (--tries_left_ > 0) return;
  const double cheapest = *std::min_element(costs_, costs_ + kKept);
  around_is_faster_ = around_ ? cheapest_try_ >= kWorthIt * cheapest : cheapest >= kWorthIt * cheapest_try_;
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
