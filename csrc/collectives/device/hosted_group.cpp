#include "collectives/device/hosted_group.h"

#include <exception>
#include <utility>

namespace ours {

namespace {

/// Less than the time within which abort() has to free all waiters.
constexpr std::chrono::milliseconds kPatience{50};

}  // namespace

HostedGroup::HostedGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
    : host_(std::move(host)), device_(std::move(device)) {}

void HostedGroup::check_usable(const Call& call) {
  // A group that has failed throws that at once, whatever is called.
  if (!host_->failure().empty()) host_->barrier(call);
  check_not_left();
}

void HostedGroup::check_not_left() const {
  if (left_) throw Error("this rank has left the group; make a new one to communicate");
}

void HostedGroup::guarded(const Running& run, const std::function<void()>& body) {
  const Call& call = run.call;
  try {
    const std::lock_guard<std::mutex> lock(busy_);
    check_not_left();  // again, as nobody can leave before the lock is given back
    try {
      run_past_misuse(call, body);
    } catch (...) {
      // The peers first: they wait. Then the streams, which the end of some of the device's work may wait for.
      host_->fail(std::current_exception());
      if (on_failure_) on_failure_();
      settled_ = settle(kPatience) && settled_;
      throw;
    }
  } catch (...) {
    let_go_if_left();
    // One story on all ranks: what was recorded first.
    if (!host_->failure().empty()) host_->barrier(call);
    throw;
  }
  let_go_if_left();
}

void HostedGroup::run_past_misuse(const Call& call, const std::function<void()>& body) const {
  try {
    body();
  } catch (const InvalidArgument& e) {
    // What is found once the peers may have begun is no mistake that they could ignore.
    throw DeviceError(std::string(name_of(call.op)) + " on rank " + std::to_string(rank()) + ": " + e.what());
  }
}

void HostedGroup::wait(DeviceEvent& event, const Running& run, const char* doing) {
  const Call& call = run.call;
  if (event.reached()) return;
  const auto look_around = [&] {
    if (!host_->failure().empty()) host_->barrier(call);
  };
  wait_reached(event, call.deadline, look_around,
               std::string(doing) + " of " + describe_record(run.record) + " on rank " + std::to_string(rank()));
}

void HostedGroup::leave() noexcept {
  left_ = true;
  let_go_if_left();
  host_->leave();
}

void HostedGroup::let_go_if_left() noexcept {
  if (!left_) return;
  // Where an operation is under way on another thread, that looks here when it ends.
  const std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
  if (!lock || has_let_go_) return;
  has_let_go_ = true;
  let_go(settled_ && !in_child());
}

void HostedGroup::end() noexcept {
  if (in_child()) return let_go(false);
  leave();
}

bool HostedGroup::in_child() const { return !owner_.is_here(); }

bool settles(DeviceEvent& event, std::chrono::milliseconds patience) noexcept {
  try {
    wait_reached(event, Deadline::after(patience), [] {}, "what is under way");
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace ours
