#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/group.h"
#include "support/engine_ranks.h"
#include "support/hierarchical_ranks.h"
#include "support/node_ranks.h"
#include "support/tcp_ranks.h"

namespace ours::testing {

/// One way to make a group. A new kind of group is a row of group_kinds().
struct GroupKind {
  std::string name;
  /// Makes the ranks' groups, each of which is used on a thread of its own. Chunks have that many bytes; 0 means the
  /// default.
  std::function<std::vector<std::function<std::shared_ptr<Group>()>>(int ranks, size_t chunk)> make;
  /// The order of sums, and so their bits, depend on where chunks end.
  bool order_by_chunks = false;
  /// Ranks have threads besides their own, for which the tests' machines have no cores, so fewer ranks and sizes are
  /// tried.
  bool many_threads = false;
  /// The ranks compare what they called when results may already have been written.
  bool compares_afterwards = false;
};

inline GroupKind node_kind(const std::string& name, Setting write_around) {
  return {name, [write_around](int ranks, size_t chunk) {
            NodeConfig config = NodeConfig::from_options(ranks);
            if (chunk != 0) config = NodeConfig{chunk, chunk / 4, 4096};
            std::vector<std::function<std::shared_ptr<Group>()>> makers;
            const auto leader = NodeSession::create(0, ranks, config);
            for (int r = 0; r < ranks; ++r) {
              const auto session = r == 0 ? leader : std::make_shared<NodeSession>(r, ranks, leader->memory());
              makers.emplace_back([session, write_around] {
                session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
                return std::make_shared<NodeGroup>(session, "", write_around);
              });
            }
            return makers;
          }};
}

/// If `engine_polls` has a value, an engine carries the payloads.
inline GroupKind tcp_kind(const std::string& name, int streams, bool ring,
                          std::optional<bool> engine_polls = std::nullopt) {
  return {name, [streams, ring, engine_polls](int ranks, size_t chunk) {
            TcpConfig config = loopback_config();
            config.plan.streams = streams;
            if (chunk != 0) config.plan.chunk_bytes = chunk;
            // Small messages use another algorithm, and among many ranks that means another order.
            const std::string small = chunk != 0 ? "1K" : "64K";
            config.plan.rules = "all sent<=" + small + " whole;all direct";
            if (ring) config.plan.rules = "all nodes=1 direct;all bytes<=" + small + " doubling;all ring";
            std::vector<std::function<std::shared_ptr<Group>()>> makers;
            const auto meshes = make_meshes(ranks, config);
            if (engine_polls) connect_engines(meshes, *engine_polls);
            for (const auto& mesh : meshes) {
              makers.emplace_back([mesh] { return std::make_shared<TcpGroup>(mesh); });
            }
            return makers;
          }};
}

inline GroupKind hierarchical_kind(const std::string& name, int rails, const std::function<int(int rank)>& node_of,
                                   const std::string& rules = "", std::optional<bool> engine_polls = std::nullopt) {
  const auto make = [rails, node_of, rules, engine_polls](int ranks, size_t chunk) {
    HierarchicalConfig config;
    config.engine_polls = engine_polls;
    config.rails = rails;
    config.rules = rules;
    config.chunk = chunk;
    return make_hierarchical(ranks, node_of, config);
  };
  return {name, make, rules.find("ring") != std::string::npos};
}

inline const std::vector<GroupKind>& group_kinds() {
  static const std::vector<GroupKind> kKinds = {
      node_kind("shared memory", Setting::Auto),
      node_kind("shared memory, around the cache", Setting::On),
      tcp_kind("tcp, direct", 1, false),
      tcp_kind("tcp, direct, 3 streams", 3, false),
      tcp_kind("tcp, ring", 1, true),
      tcp_kind("tcp, ring, 2 streams", 2, true),
      hierarchical_kind("2 a node", 0, [](int r) { return r / 2; }),
      hierarchical_kind("4 a node, 1 rail", 1, [](int r) { return r / 4; }),
      hierarchical_kind("3 nodes by turns", 0, [](int r) { return r % 3; }),
      hierarchical_kind("3 and 1 a node", 0, [](int r) { return r < 3 ? 0 : r; }),
      hierarchical_kind("1 a node", 0, [](int r) { return r; }),
      hierarchical_kind(
          "2 a node, around a ring", 0, [](int r) { return r / 2; }, "all ring"),
      hierarchical_kind(
          "1 a node, short ones doubled", 0, [](int r) { return r; }, "all bytes<=1K doubling;all ring"),
      tcp_kind("an engine that polls, direct", 2, false, true),
      tcp_kind("an engine with threads, ring", 2, true, false),
      hierarchical_kind(
          "2 a node, an engine that polls", 0, [](int r) { return r / 2; }, "", true),
      hierarchical_kind("3 nodes by turns, an engine with threads", 0, [](int r) { return r % 3; }, "", false)};
  return kKinds;
}

/// Runs fn(group) on the ranks of a group of that kind; returns what each threw.
inline std::vector<std::exception_ptr> run_groups_catching(const GroupKind& kind, int ranks, size_t chunk,
                                                           const std::function<void(Group&)>& fn) {
  const auto makers = kind.make(ranks, chunk);
  std::atomic<int> made{0};
  return run_ranks_catching(ranks, [&](int rank) {
    std::shared_ptr<Group> group;
    try {
      group = makers[static_cast<size_t>(rank)]();
    } catch (...) {
      ++made;
      throw;
    }
    // A rank that aborts at once must not disturb those that are still being connected.
    ++made;
    while (made < ranks) std::this_thread::yield();
    fn(*group);
  });
}

inline void run_groups(const GroupKind& kind, int ranks, size_t chunk, const std::function<void(Group&)>& fn) {
  const auto errors = run_groups_catching(kind, ranks, chunk, fn);
  for (size_t r = 0; r < errors.size(); ++r) {
    if (errors[r]) throw Failure(kind.name + ", rank " + std::to_string(r) + ": " + message_of(errors[r]));
  }
}

}  // namespace ours::testing
