#include "common/awaited.h"

#include <exception>
#include <map>
#include <mutex>

#include "common/process_wide.h"

namespace ours {

namespace {

struct Waits {
  std::map<const Awaited*, std::string> by_call;

  /// A child's calls wait for nobody yet.
  void in_child() { by_call.clear(); }
};

}  // namespace

void Awaited::set(const std::string& whom) noexcept {
  if (whom == whom_) return;
  try {
    whom_ = whom;
    auto& all = ProcessWide<Waits>::get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (whom.empty()) {
      all.value.by_call.erase(this);
    } else {
      all.value.by_call[this] = whom;
    }
  } catch (const std::exception&) {
    // Out of memory: others hear less.
  }
}

std::string describe_awaited() {
  auto& all = ProcessWide<Waits>::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::string text;
  for (const auto& [call, whom] : all.value.by_call) text += (text.empty() ? "; it waits for " : " and for ") + whom;
  return text;
}

}  // namespace ours
