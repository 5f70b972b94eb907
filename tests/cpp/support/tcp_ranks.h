#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/tcp/tcp_group.h"
#include "support/calls.h"
#include "support/ranks.h"

namespace ours::testing {

/// The keys of one group, for ranks that are threads.
class MapKeys final : public KeyValues {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;
  std::string known(const std::string& key) override;
  size_t size();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// A configuration over the loopback of one family, or both.
TcpConfig loopback_config(const std::string& interface = "127.0.0.1");

std::shared_ptr<TcpMesh> join_mesh(int rank, int size, const std::shared_ptr<KeyValues>& keys,
                                   const TcpConfig& config = loopback_config());

using Meshes = std::vector<std::shared_ptr<TcpMesh>>;

/// Meshes of `n` ranks of one process.
Meshes make_meshes(int n, const TcpConfig& config = loopback_config(),
                   const std::shared_ptr<KeyValues>& keys = std::make_shared<MapKeys>());

}  // namespace ours::testing
