#include "backend/group_end.h"

#include <algorithm>

#include "backend/collective_work.h"

namespace ours {

namespace {

/// How long the end of a group or program waits for a callback that still runs, and for the abort hooks of a failed
/// group.
constexpr std::chrono::milliseconds kCallbackPatience{5000};
constexpr std::chrono::milliseconds kHookPatience{15000};

}  // namespace

void GroupParts::close() const noexcept {
  status->set_closed();
  try {
    if (queue->busy() || messages->busy()) {
      status->set_aborted();
      group->abort("it was destroyed, or its program ended, with operations under way");
    }
    messages->close();
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
  } catch (const std::exception& e) {
    TORCH_WARN("waiting for a closed process group: ", e.what());
  }
}

void GroupParts::abandon() { new GroupParts(std::move(*this)); }

GroupRegistry& GroupRegistry::instance() {
  // Never destroyed: threads may outlive static destructors.
  static GroupRegistry* const registry = new GroupRegistry;
  return *registry;
}

void GroupRegistry::add(const GroupParts& parts) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.status.expired(); }),
                 entries_.end());
  entries_.push_back({parts.status, parts.queue, parts.group, parts.messages});
}

void GroupRegistry::close_all() noexcept {
  std::vector<Entry> entries;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entries.swap(entries_);
  }
  for (const Entry& entry : entries) {
    const auto status = entry.status.lock();
    if (!status || status->is_forked_child()) continue;
    const GroupParts parts{status, entry.queue.lock(), entry.group.lock(), entry.messages.lock()};
    if (parts.queue && parts.group && parts.messages) {
      parts.close();
      parts.wait_closed();
    }
    status->wait_for_abort_hooks(kHookPatience);
  }
}

}  // namespace ours
