#include "support/groups.h"

#include <atomic>

#include "support/engine_ranks.h"

namespace ours::testing {

namespace {

const std::string kDirect = "all sent<=SMALL whole;all direct";
const std::string kRing = "all nodes=1 direct;all bytes<=SMALL doubling;all ring";

}  // namespace

GroupKind node_kind(const std::string& name, Setting write_around, const std::string& rules, const NodeTerms& terms) {
  return {name, [write_around, rules, terms](int ranks, size_t chunk) {
            std::vector<std::function<std::shared_ptr<Group>()>> makers;
            for (const auto& session : make_sessions(ranks, chunk, terms)) {
              const std::string chosen = rules.empty() ? small_node_rules(chunk) : rules;
              makers.emplace_back([=] { return std::make_shared<NodeGroup>(session, chosen, write_around); });
            }
            return makers;
          }};
}

GroupKind tcp_kind(const std::string& name, int streams, const std::string& rules, std::optional<bool> engine_polls) {
  const auto make = [streams, rules, engine_polls](int ranks, size_t chunk) {
    TcpConfig config = loopback_config();
    config.plan.streams = streams;
    if (chunk != 0) config.plan.chunk_bytes = chunk;
    // Among many ranks another algorithm means another order of sums.
    const std::string small = "SMALL";
    config.plan.rules = rules;
    const size_t at = rules.find(small);
    if (at != std::string::npos) config.plan.rules.replace(at, small.size(), chunk != 0 ? "1K" : "64K");
    std::vector<std::function<std::shared_ptr<Group>()>> makers;
    const auto meshes = make_meshes(ranks, config);
    if (engine_polls) connect_engines(meshes, *engine_polls);
    for (const auto& mesh : meshes) makers.emplace_back([mesh] { return std::make_shared<TcpGroup>(mesh); });
    return makers;
  };
  GroupKind kind{name, make};
  kind.in_order = rules == kDirect;  // others add up in an order of their own
  return kind;
}

GroupKind hierarchical_kind(const std::string& name, const HierarchicalLimits& limits, const NodeOf& node_of,
                            const std::string& rules, std::optional<bool> engine_polls) {
  const auto make = [limits, node_of, rules, engine_polls](int ranks, size_t chunk) {
    HierarchicalConfig config;
    config.engine_polls = engine_polls;
    config.limits = limits;
    config.rules = rules;
    config.chunk = chunk;
    const auto all = std::make_shared<HierarchicalRanks>(ranks, node_of, config);
    std::vector<std::function<std::shared_ptr<Group>()>> makers;
    for (int rank = 0; rank < ranks; ++rank) makers.emplace_back([all, rank] { return all->group(rank); });
    return makers;
  };
  GroupKind kind{name, make, !rules.empty()};
  kind.in_order = rules.empty();
  kind.node_of = node_of;
  return kind;
}

const std::vector<GroupKind>& group_kinds() {
  const NodeOf alone = [](int r) { return r; };
  const NodeOf pairs = [](int r) { return r / 2; };
  const NodeOf turns = [](int r) { return r % 3; };
  const NodeOf uneven = [](int r) { return r < 2 ? 0 : r < 5 ? 1 : r; };
  const HierarchicalLimits relays{0, 0};
  static const std::vector<GroupKind> kKinds = {
      node_kind("shared memory", Setting::Auto),
      node_kind("shared memory, by its segment and around the cache", Setting::On, "", {false}),
      node_kind("shared memory, 2 domains", Setting::Auto, "", {true, 2}),
      node_kind("shared memory, by its segment, 3 domains", Setting::Auto, "", {false, 3}),
      tcp_kind("tcp, direct", 1, kDirect),
      tcp_kind("tcp, direct, 3 streams", 3, kDirect),
      tcp_kind("tcp, ring", 1, kRing),
      tcp_kind("tcp, ring, 2 streams", 2, kRing),
      hierarchical_kind("2 a node", {}, pairs),
      hierarchical_kind("4 a node, 1 rail, relays", {1, 0}, [](int r) { return r / 4; }),
      hierarchical_kind("3 nodes by turns", {}, turns),
      hierarchical_kind("3 and 1 a node, relays", relays, [](int r) { return r < 3 ? 0 : r; }),
      hierarchical_kind("1 a node", {}, alone),
      hierarchical_kind("2 a node, around a ring", {}, pairs, "all ring"),
      hierarchical_kind("1 a node, short ones doubled", {}, alone, "all bytes<=1K doubling;all ring"),
      hierarchical_kind("2, 3 and 1 a node, doubled, relays", relays, uneven, "all doubling"),
      tcp_kind("an engine that polls, direct", 2, kDirect, true),
      tcp_kind("an engine with threads, ring", 2, kRing, false),
      hierarchical_kind("2 a node, an engine that polls", {}, pairs, "", true),
      hierarchical_kind("3 nodes by turns, an engine with threads, relays", relays, turns, "", false)};
  return kKinds;
}

void run_groups(const GroupKind& kind, int ranks, size_t chunk, const std::function<void(Group&)>& fn) {
  const auto makers = kind.make(ranks, chunk);
  std::atomic<int> made{0};
  try {
    run_ranks(ranks, [&](int rank) {
      std::shared_ptr<Group> group;
      try {
        group = makers[static_cast<size_t>(rank)]();
      } catch (...) {
        ++made;
        throw;
      }
      // A rank that aborts at once must not disturb those that are still being connected.
      ++made;
      wait_until([&] { return made == ranks; });
      fn(*group);
    });
  } catch (const Failure& e) {
    throw Failure(kind.name + ": " + e.what());
  }
}

}  // namespace ours::testing
