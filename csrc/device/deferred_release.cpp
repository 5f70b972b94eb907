#include "device/deferred_release.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <mutex>
#include <system_error>
#include <utility>

#include "common/background_thread.h"

namespace ours {

namespace {

/// How long an owner waits for memory to be freed, so that it usually can be used again at once.
constexpr std::chrono::milliseconds kFreeing{20};

struct Deferred {
  std::function<bool()> is_over;
  std::shared_ptr<void> owned;

  bool in_use() const noexcept {
    try {
      return !is_over();
    } catch (const std::exception&) {
      return true;
    }
  }
};

struct Registry {
  std::mutex mutex;
  std::vector<Deferred> all;  // guarded by mutex

  static Registry& instance() {
    // Never destroyed: memory may be released at the very end.
    static auto* const kOnly = new Registry;
    return *kOnly;
  }
};

}  // namespace

std::shared_ptr<void> end_aside(std::shared_ptr<void> owned) {
  void* const data = owned.get();
  auto end = [owned = std::move(owned)](void*) mutable noexcept {
    const auto last = std::make_shared<std::shared_ptr<void>>(std::move(owned));
    try {
      ends_in_background("ours_free", [last] { last->reset(); }, kFreeing);
    } catch (const std::system_error&) {
      release_when([] { return false; }, last);  // no thread can be started
    }
  };
  return {data, std::move(end)};
}

void release_when(std::function<bool()> is_over, std::shared_ptr<void> owned) noexcept {
  if (!owned) return;
  {
    Registry& registry = Registry::instance();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.all.push_back({std::move(is_over), std::move(owned)});
  }
  release_deferred();
}

void release_after(Device& device, const std::vector<StreamHandle>& streams, std::shared_ptr<void> owned) noexcept {
  try {
    std::vector<std::shared_ptr<DeviceEvent>> ends;
    for (const StreamHandle stream : streams) {
      ends.emplace_back(device.make_event())->record(stream);
    }
    const auto all_reached = [ends = std::move(ends)] {
      return std::all_of(ends.begin(), ends.end(), [](const auto& end) { return end->reached(); });
    };
    release_when(all_reached, std::move(owned));
  } catch (const std::exception&) {
    release_when([] { return false; }, std::move(owned));
  }
}

void release_deferred() noexcept {
  Registry& registry = Registry::instance();
  // Destroyed without the lock, because that may take long, need the GIL, or release more.
  std::vector<Deferred> unused;
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto first =
      std::stable_partition(registry.all.begin(), registry.all.end(), [](const Deferred& one) { return one.in_use(); });
  unused.assign(std::make_move_iterator(first), std::make_move_iterator(registry.all.end()));
  registry.all.erase(first, registry.all.end());
}

size_t count_deferred() {
  Registry& registry = Registry::instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.all.size();
}

}  // namespace ours
