#include "backend/callback.h"

#include <algorithm>
#include <system_error>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "backend/interruptible.h"
#include "common/background_thread.h"
#include "common/deadline.h"

namespace ours {

Callback*& Callback::running() {
  thread_local Callback* current = nullptr;
  return current;
}

// A callback that is attached inside another one comes before that one, which may communicate again once this one has
// returned. So it is when callbacks run at once.
Callback::Callback(const Origin& origin) : origin_(current() != nullptr ? current()->origin_ : origin) {
  CallbackOrder& order = *origin_.order;
  const std::lock_guard<std::mutex> lock(order.mutex_);
  const auto next = current() != nullptr ? current()->position_ : order.callbacks_.end();
  position_ = order.callbacks_.insert(next, this);
}

void Callback::leave() noexcept {
  CallbackOrder& order = *origin_.order;
  const std::lock_guard<std::mutex> lock(order.mutex_);
  if (!std::exchange(has_place_, false)) return;
  order.callbacks_.erase(position_);
  order.returned_.notify_all();
}

bool Callback::has_turn() const {
  const std::lock_guard<std::mutex> lock(origin_.order->mutex_);
  return origin_.order->callbacks_.front() == this;
}

void Callback::hand_over(std::function<void()> body) const {
  const std::shared_ptr<CallbackOrder> order = origin_.order;
  {
    const std::lock_guard<std::mutex> lock(order->mutex_);
    ++order->handed_over_;
  }
  const std::function<void()> run = [order, body = std::move(body)]() mutable {
    body();
    body = nullptr;  // its destruction may need Python, whose end waits only for this thread
    const std::lock_guard<std::mutex> lock(order->mutex_);
    --order->handed_over_;
    order->returned_.notify_all();
  };
  try {
    start_background_thread("ours_callback", run);
  } catch (const std::system_error&) {
    run();  // without a new thread, all that is left is to hope that no earlier callback is on this thread's stack
  }
}

void Callback::await_turn(std::chrono::milliseconds timeout) const {
  CallbackOrder& order = *origin_.order;
  std::unique_lock<std::mutex> lock(order.mutex_);
  const auto first = [&] { return order.callbacks_.front() == this; };
  if (!await_interruptibly(order.returned_, lock, Deadline::after(timeout), first).empty()) throw_interrupt();
  if (first()) return;
  C10_THROW_ERROR(
      DistBackendError,
      c10::str("a callback on the future of collective number ", origin_.number,
               " waits for one that was attached before it, which has not returned within ", timeout.count(),
               " ms. The callbacks of a group run one after another, in the order in which they were attached: do not "
               "let one wait for a later one"));
}

CallbackOrder::CallbackOrder(std::string group, std::vector<uint64_t> ranks)
    : group_(std::move(group)), ranks_([&ranks] {
        std::sort(ranks.begin(), ranks.end());
        return std::move(ranks);
      }()) {}

bool CallbackOrder::await_handed_over() {
  // The callbacks after this one wait for it.
  if (Callback::current() != nullptr && Callback::current()->origin().order.get() == this) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto none = [this] { return handed_over_ == 0; };
  if (none()) return false;
  await_interruptibly(returned_, lock, Deadline::never(), none);
  return true;
}

std::string CallbackOrder::name_for(const CallbackOrder& other) const {
  if (this == &other) return "its own";
  const auto& members = other.ranks_;
  const bool common = !members.empty() && std::includes(ranks_.begin(), ranks_.end(), members.begin(), members.end());
  return common ? "of group " + group_ : "of others";
}

}  // namespace ours
