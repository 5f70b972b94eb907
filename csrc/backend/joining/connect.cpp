#include "backend/joining/connect.h"

#include <numeric>
#include <optional>

#include "backend/errors.h"
#include "backend/joining/engine_choice.h"
#include "collectives/hierarchical/hierarchical_group.h"
#include "collectives/hierarchical/hierarchical_messages.h"
#include "collectives/node/node_group.h"
#include "collectives/node/node_messages.h"
#include "collectives/select.h"
#include "collectives/solo/solo.h"
#include "collectives/tcp/tcp_group.h"
#include "collectives/tcp/tcp_messages.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "common/listed.h"
#include "common/options.h"
#include "common/other_failures.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

namespace {

/// In groups of up to this size, each rank fetches the addresses of all others at once. In larger ones it fetches those
/// of its counterparts on up to so many nodes, beyond which few algorithms connect to all of them, and the others when
/// needed.
constexpr int kMostFetched = 64, kMostCounterparts = 450;

/// TCP connections among all ranks, including those of one node.
struct Meshes {
  std::shared_ptr<TcpMesh> calls;
  std::shared_ptr<TcpMesh> messages;
};

/// The rules of rank 0, which hold for all ranks. Only rank 0 needs to have their file.
std::string rules_of(Rendezvous& rendezvous) {
  const Meeting& meeting = rendezvous.meeting();
  if (meeting.rank != 0) return "";
  try {
    const std::string& own = meeting.selection;
    return (own.empty() ? selection_from(options().select) : Selection::parse(own)).rules();
  } catch (const InvalidArgument& e) {
    rendezvous.fail(rendezvous.describe_self() + " has no table of algorithms for " + meeting.group + ": " + e.what());
  }
}

/// Fetches rank 0's terms before the mesh needs them, because the mesh would not notice a rank that fails meanwhile.
void fetch_terms(const Rendezvous& rendezvous, StoreKeys& keys) {
  const Meeting& meeting = rendezvous.meeting();
  try {
    keys.fetch({kTermsKey}, rendezvous.deadline());
  } catch (const StoreSilent&) {
    throw;
  } catch (const TimeoutError&) {
    throw TimeoutError("rank 0 of " + meeting.group + " did not publish its terms within " +
                       std::to_string(meeting.timeout.count()) + " ms (" + rendezvous.describe_self() +
                       " waited for them). Did it fail?");
  }
}

/// Makes the meshes. Those that are there when it fails are in `meshes`.
void join_meshes(Meshes& meshes, Rendezvous& rendezvous, const Topology& topology, const std::string& rules) {
  const Meeting& meeting = rendezvous.meeting();
  const auto keys_of_calls = rendezvous.keys("calls");
  const auto keys_of_messages = rendezvous.keys("messages");
  const auto join = [&](const std::shared_ptr<StoreKeys>& keys, const TcpConfig& config) {
    if (meeting.rank != 0) fetch_terms(rendezvous, *keys);
    auto mesh = TcpMesh::join(meeting.rank, meeting.size, keys, config, rendezvous.deadline());
    mesh->introduce(rendezvous.names());
    return mesh;
  };
  try {
    TcpConfig config = TcpConfig::from_options(host_of(meeting.store));
    config.plan.rules = rules;
    meshes.calls = join(keys_of_calls, config);
    config.plan.streams = 1;
    meshes.messages = join(keys_of_messages, config);
  } catch (const TimeoutError&) {
    throw;
  } catch (const PeerError&) {
    throw;
  } catch (const Error& e) {
    rendezvous.fail(rendezvous.describe_self() + " cannot be reached by ranks on other nodes of " + meeting.group +
                    ": " + e.what());
  }
  TcpMesh::share_failures(meshes.calls, meshes.messages);
  // Ranks agree here so that none waits for a rank that found no address, and each rank's first call finds all others.
  agree_on_engine(rendezvous);
  const auto fetch = [&](StoreKeys& keys, const std::vector<int>& ranks) {
    std::vector<std::string> cards;
    for (const int rank : ranks) cards.push_back(card_key(rank));
    keys.fetch(cards, rendezvous.deadline());
  };
  if (meeting.size <= kMostFetched) {
    std::vector<int> all(static_cast<size_t>(meeting.size));
    std::iota(all.begin(), all.end(), 0);
    fetch(*keys_of_calls, all);
    fetch(*keys_of_messages, all);
  } else {
    fetch(*keys_of_calls, topology.counterparts(meeting.rank, kMostCounterparts));
  }
  // The messages of send() and recv() to other nodes stay with TCP, since engines cannot tell which of several arrives
  // first.
  if (auto engine = make_engine(rendezvous, meshes.calls->card())) meshes.calls->set_engine(std::move(engine));
}

Connections connect_nodes(Rendezvous& rendezvous, const Topology& topology, const std::string& rules) {
  Meshes meshes;
  try {
    join_meshes(meshes, rendezvous, topology, rules);
    // Only a HierarchicalGroup converts to the type of the wire.
    const bool converts = meshes.calls->plan().wire != WireType::Float32;
    if (topology.nodes() == topology.size() && !converts) {
      return {std::make_shared<TcpGroup>(meshes.calls), make_tcp_point_to_point(meshes.messages, meshes.calls)};
    }
    const auto session = rendezvous.open_node(topology);
    auto group = std::make_shared<HierarchicalGroup>(topology, session, meshes.calls);
    return {std::move(group), make_hierarchical_point_to_point(session, meshes.messages, meshes.calls)};
  } catch (const Error&) {
    // Ranks of other nodes may have joined already. They would take it for this rank's fault that nobody answers here.
    for (const auto& mesh : {meshes.calls, meshes.messages}) {
      if (!mesh) continue;
      mesh->fail(std::current_exception());
      mesh->leave();
    }
    throw;
  }
}

// The one place where the kind of a group of several ranks is chosen.
Connections connect(Rendezvous& rendezvous) {
  std::string rules = rules_of(rendezvous);
  const Topology topology = rendezvous.find_topology(rules);
  if (topology.nodes() == 1) {
    const auto session = rendezvous.open_node(topology);
    return {std::make_shared<NodeGroup>(session, rules), make_node_point_to_point(session)};
  }
  return connect_nodes(rendezvous, topology, rules);
}

/// Throws the same InvalidArgument on all ranks if they are on several nodes.
std::shared_ptr<NodeSession> connect_one_node(Rendezvous& rendezvous) {
  std::string rules;
  const Topology topology = rendezvous.find_topology(rules);
  if (topology.nodes() == 1) return rendezvous.open_node(topology);
  std::string nodes;
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::vector<int>& ranks = topology.ranks_of(node);
    const auto first = static_cast<size_t>(ranks.front());
    const std::vector<std::string>& names = rendezvous.names();
    nodes += (node == 0 ? "" : "; ") + std::string("rank ") + listed(ranks) +
             (first < names.size() ? " beside " + names[first] : "");
  }
  throw InvalidArgument(rendezvous.meeting().group + " needs ranks that share a node's memory, but these are on " +
                        std::to_string(topology.nodes()) + " nodes: " + nodes +
                        ". Make a group of the ranks of each node with new_group()");
}

/// Calls `join` with the rendezvous of the ranks.
template <class Join>
auto come_together(const Meeting& meeting, Join&& join) {
  return with_torch_errors("", [&] {
    std::optional<Rendezvous> rendezvous;
    try {
      rendezvous.emplace(meeting);
      try {
        return join(*rendezvous);
      } catch (const StoreSilent&) {
        throw;
      } catch (const TimeoutError& e) {
        // The first that gives up knows best for whom. A rank that was stopped hears it when it goes on.
        JoinMonitor::raise(rendezvous->report(FailureKind::Timeout, e.what()));
      }
    } catch (const Error& e) {
      remember_failure(e.what());
      if (was_interrupted() && rendezvous) {
        rendezvous->report(FailureKind::System,
                           rendezvous->describe_self() + " was interrupted while " + meeting.group + " was being made");
      }
      throw_interrupt();
      throw;
    }
  });
}

}  // namespace

Connections connect_ranks(const Meeting& meeting) {
  if (meeting.size == 1) return {make_solo_group(), make_solo_point_to_point()};
  return come_together(meeting, connect);
}

std::shared_ptr<NodeSession> connect_node(const Meeting& meeting) { return come_together(meeting, connect_one_node); }

}  // namespace ours
