#include "collectives/device/device_group_base.h"

#include <chrono>
#include <exception>
#include <utility>

namespace ours {

namespace {

/// How long the end of a group waits for the device.
constexpr std::chrono::milliseconds kPatience{50};

}  // namespace

DeviceGroupBase::DeviceGroupBase(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
    : host_(std::move(host)), device_(std::move(device)) {}

void DeviceGroupBase::check_peers(const Call& call) const {
  // A failed group throws its failure from this barrier, whatever was called.
  if (!host_->failure().empty()) host_->barrier(call);
}

void DeviceGroupBase::check_not_left() const {
  if (left_) throw Error("this rank has left the group; make a new one to communicate");
}

void DeviceGroupBase::check_usable(const Call& call) {
  check_peers(call);
  check_not_left();
}

void DeviceGroupBase::guarded(const Running& run, const std::function<void()>& body) {
  const Call& call = run.call;
  {
    std::unique_lock<std::recursive_mutex> lock(busy_);
    check_not_left();  // checked again, since nobody can leave once the lock is held
    try {
      run_past_misuse(call, body);
    } catch (...) {
      lock.unlock();
      fail_operation();
      check_peers(call);  // all ranks report the failure that was recorded first
      throw;
    }
  }
  let_go_if_left();
}

void DeviceGroupBase::fail_operation() noexcept {
  host_->fail(std::current_exception());  // the peers first, since they wait
  stop_device_work();
  settle();
  let_go_if_left();
}

void DeviceGroupBase::run_past_misuse(const Call& call, const std::function<void()>& body) const {
  try {
    body();
  } catch (const InvalidArgument& e) {
    // Peers may have begun by now, so they cannot ignore this error.
    throw DeviceError(std::string(name_of(call.op)) + " on rank " + std::to_string(rank()) + ": " + e.what());
  }
}

void DeviceGroupBase::wait(DeviceEvent& event, const Running& run, const char* doing) {
  if (event.reached()) return;
  wait_reached(
      event, run.call.deadline, [&] { check_peers(run.call); },
      std::string(doing) + " of " + describe_record(run.record) + " on rank " + std::to_string(rank()));
}

bool DeviceGroupBase::settle() noexcept {
  try {
    const Deadline patience = Deadline::after(kPatience);
    for (const StreamHandle stream : streams()) {
      const auto event = device_->make_event();
      event->record(stream);
      wait_reached(*event, patience, nullptr, "what is under way");
    }
    return true;
  } catch (const std::exception&) {
    return false;  // it takes longer, or has failed
  }
}

void DeviceGroupBase::leave() noexcept {
  left_ = true;
  let_go_if_left();
  host_->leave();
}

void DeviceGroupBase::let_go_if_left() noexcept {
  if (!left_) return;
  // If an operation is under way on another thread, that thread checks this when the operation ends.
  const std::unique_lock<std::recursive_mutex> lock(busy_, std::try_to_lock);
  if (!lock || has_let_go_) return;
  has_let_go_ = true;
  if (in_child()) return;
  settled_ = settle();
  let_go();
}

void DeviceGroupBase::end() noexcept {
  if (!in_child()) leave();
}

}  // namespace ours
