#pragma once

#include <unistd.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/tcp/tcp_group.h"
#include "support/ranks.h"

namespace ours::testing {

/// The keys of one group, for ranks that are threads.
class MapKeys final : public KeyValues {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, Deadline deadline) override {
    std::unique_lock<std::mutex> lock(mutex_);
    // On the system clock, because ThreadSanitizer of older compilers does not know the steady clock's wait.
    const auto end = std::chrono::system_clock::now() +
                     std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now());
    if (!changed_.wait_until(lock, end, [&] { return values_.count(key) != 0; })) {
      throw TimeoutError("nobody has set " + key);
    }
    return values_[key];
  }
  size_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// A configuration over the loopback of one family, or both.
inline TcpConfig loopback_config(const std::string& interface = "127.0.0.1") {
  TcpConfig config;
  config.interface = interface;
  return config;
}

using Meshes = std::vector<std::shared_ptr<TcpMesh>>;

/// How the mesh names this process.
inline std::string own_name() { return process_name("here", ::getpid()); }

/// Meshes of `n` ranks of one process.
inline Meshes make_meshes(int n, const TcpConfig& config, const std::shared_ptr<KeyValues>& keys) {
  Meshes meshes;
  for (int r = 0; r < n; ++r) {
    meshes.push_back(TcpMesh::join(r, n, keys, config, Deadline::after(std::chrono::seconds(30))));
    meshes.back()->introduce(std::vector<std::string>(static_cast<size_t>(n), own_name()));
  }
  return meshes;
}
inline Meshes make_meshes(int n, const TcpConfig& config = loopback_config()) {
  return make_meshes(n, config, std::make_shared<MapKeys>());
}

}  // namespace ours::testing
