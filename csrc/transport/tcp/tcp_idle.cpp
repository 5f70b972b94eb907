#include "transport/tcp/tcp_idle.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include "common/options.h"
#include "common/process_wide.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

namespace {

/// How often others are seen to, in uses, unless some are about to close connections,
constexpr uint64_t kInterval = 16;
/// and to how many of them for what their peers may have said.
constexpr size_t kTurns = 8;
constexpr size_t kMostByDefault = 4096;

struct Meshes {
  std::vector<std::weak_ptr<TcpMesh>> all;
  size_t turn = 0;

  /// A child has no part in its parent's groups.
  void in_child() { all.clear(); }
};

std::vector<std::shared_ptr<TcpMesh>> all_meshes(size_t& turn) {
  auto& meshes = ProcessWide<Meshes>::get();
  std::vector<std::shared_ptr<TcpMesh>> found;
  const std::lock_guard<std::mutex> lock(meshes.mutex);
  std::vector<std::weak_ptr<TcpMesh>>& all = meshes.value.all;
  for (const auto& one : all) {
    if (auto mesh = one.lock()) found.push_back(std::move(mesh));
  }
  if (found.size() < all.size()) all.assign(found.begin(), found.end());
  turn = meshes.value.turn;
  meshes.value.turn += kTurns;
  return found;
}

size_t to_keep() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return idle_connections_to_keep(options().idle_connections, limit.rlim_max);
}

}  // namespace

size_t idle_connections_to_keep(int64_t wanted, uint64_t files) {
  return wanted > 0 ? static_cast<size_t>(wanted) : std::min<size_t>(kMostByDefault, files / 4);
}

void TcpIdle::enter(const std::shared_ptr<TcpMesh>& mesh) {
  auto& meshes = ProcessWide<Meshes>::get();
  const std::lock_guard<std::mutex> lock(meshes.mutex);
  meshes.value.all.push_back(mesh);
}

uint64_t TcpIdle::count_use() noexcept {
  static std::atomic<uint64_t> uses{0};
  static std::atomic<uint64_t> next{kInterval};
  const uint64_t use = ++uses;
  if (use >= next.load()) {
    next = use + kInterval;
    try {
      if (see_to_others(to_keep())) next = use + 1;
    } catch (const std::exception&) {
      // Out of memory: the connections stay.
    }
  }
  return use;
}

bool TcpIdle::see_to_others(size_t most) {
  size_t turn = 0;
  auto meshes = all_meshes(turn);
  size_t idle = 0;
  for (size_t i = 0; i < meshes.size(); ++i) {
    const bool has_turn = (i + meshes.size() - turn % meshes.size()) % meshes.size() < kTurns;
    idle += meshes[i]->idle_connections(has_turn);
  }
  if (idle <= most) return false;
  // By copies of the numbers, which change whenever somebody uses a mesh.
  std::vector<std::pair<uint64_t, TcpMesh*>> by_use;
  by_use.reserve(meshes.size());
  for (const auto& mesh : meshes) by_use.emplace_back(mesh->last_use(), mesh.get());
  std::sort(by_use.begin(), by_use.end());
  for (auto one = by_use.begin(); idle > most && one != by_use.end(); ++one) {
    idle -= std::min(idle, one->second->park());
  }
  return true;
}

}  // namespace ours
