#include "backend/group_end.h"

#include <algorithm>

#include "backend/collective_work.h"

namespace ours {

namespace {

/// How long the end of a group or program waits for a running callback, and for the abort hooks of a failed group.
constexpr std::chrono::milliseconds kCallbackPatience{5000};
constexpr std::chrono::milliseconds kHookPatience{15000};

/// How long the end of a program waits for peers that have yet to join the last operations of its devices.
constexpr std::chrono::milliseconds kLastPatience{5000};

std::chrono::milliseconds left(Deadline deadline) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now());
}

}  // namespace

void GroupParts::abort(const std::string& reason) const {
  status->set_aborted();
  group->abort(reason);
  devices->abort(reason);
}

void GroupParts::drain(Deadline deadline) const noexcept {
  try {
    if (!devices->device() || status->error() != c10d::ErrorType::SUCCESS || !group->failure().empty()) return;
    queue->wait_idle(left(deadline));
  } catch (const std::exception& e) {
    TORCH_WARN("waiting for the last operations of a process group: ", e.what());
  }
}

void GroupParts::close() const noexcept {
  status->set_closed();
  try {
    // wait() may have returned before the operation failed.
    if (devices->enqueues() && !group->failure().empty() && !status->told.exchange(true)) {
      TORCH_WARN("a process group ends that has failed, and no call told of it: ", group->failure());
    }
    if (queue->busy()) {
      abort("it was destroyed, or its program ended, with operations under way");
    } else if (messages->busy() || transfers->busy()) {
      // They end with an error here, which concerns no other rank. The peers may go on among themselves.
      status->set_aborted();
    }
    messages->close();
    transfers->close();
    devices->leave();
    group->leave();
    queue->stop();
  } catch (const std::exception& e) {
    TORCH_WARN("closing a process group: ", e.what());
  }
}

void GroupParts::wait_closed() const noexcept {
  try {
    queue->wait_stopped(kCallbackPatience);
    messages->wait_closed(kCallbackPatience);
    transfers->wait_closed(kCallbackPatience);
  } catch (const std::exception& e) {
    TORCH_WARN("waiting for a closed process group: ", e.what());
  }
}

void GroupParts::abandon() { new GroupParts(std::move(*this)); }

GroupRegistry& GroupRegistry::instance() {
  // Never destroyed, since threads may outlive static destructors.
  static GroupRegistry* const registry = new GroupRegistry;
  return *registry;
}

void GroupRegistry::add(const GroupParts& parts) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.status.expired(); }),
                 entries_.end());
  entries_.push_back({parts.status, parts.queue, parts.group, parts.messages, parts.devices, parts.transfers});
}

void GroupRegistry::close_all() noexcept {
  std::vector<Entry> entries;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entries.swap(entries_);
  }
  std::vector<GroupParts> groups;
  for (const Entry& entry : entries) {
    const auto status = entry.status.lock();
    if (!status || status->is_forked_child()) continue;
    groups.push_back({status, entry.queue.lock(), entry.group.lock(), entry.messages.lock(), entry.devices.lock(),
                      entry.transfers.lock()});
    const GroupParts& parts = groups.back();
    if (!parts.queue || !parts.group || !parts.messages || !parts.devices || !parts.transfers) groups.pop_back();
  }
  // All are closed before any is waited for, since a callback of one may wait for another.
  const Deadline deadline = Deadline::after(kLastPatience);
  for (const GroupParts& parts : groups) parts.drain(deadline);
  for (const GroupParts& parts : groups) parts.close();
  for (const GroupParts& parts : groups) parts.wait_closed();
  for (const GroupParts& parts : groups) parts.status->wait_for_abort_hooks(kHookPatience);
}

}  // namespace ours
