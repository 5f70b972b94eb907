#include "support/tcp_ranks.h"

#include <unistd.h>

namespace ours::testing {

void MapKeys::set(const std::string& key, const std::string& value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::string MapKeys::get(const std::string& key, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  // On the system clock, because ThreadSanitizer of older compilers does not know the steady clock's wait.
  const auto end = std::chrono::system_clock::now() +
                   std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now());
  if (!changed_.wait_until(lock, end, [&] { return values_.count(key) != 0; })) {
    throw TimeoutError("nobody has set " + key);
  }
  return values_[key];
}

std::string MapKeys::known(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = values_.find(key);
  return found == values_.end() ? "" : found->second;
}

size_t MapKeys::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return values_.size();
}

TcpConfig loopback_config(const std::string& interface) {
  TcpConfig config;
  config.interface = interface;
  return config;
}

std::shared_ptr<TcpMesh> join_mesh(int rank, int size, const std::shared_ptr<KeyValues>& keys,
                                   const TcpConfig& config) {
  auto mesh = TcpMesh::join(rank, size, keys, config, Deadline::after(std::chrono::seconds(30)));
  mesh->introduce(std::vector<std::string>(static_cast<size_t>(size), process_name("here", ::getpid())));
  return mesh;
}

Meshes make_meshes(int n, const TcpConfig& config, const std::shared_ptr<KeyValues>& keys) {
  Meshes meshes;
  for (int r = 0; r < n; ++r) meshes.push_back(join_mesh(r, n, keys, config));
  return meshes;
}

}  // namespace ours::testing
