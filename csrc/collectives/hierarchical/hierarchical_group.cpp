#include "collectives/hierarchical/hierarchical_group.h"

#include <algorithm>
#include <utility>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/hierarchical/shared_failure.h"
#include "collectives/tcp/tcp_run.h"
#include "common/error.h"

namespace ours {

namespace {

NodeMap map_of(Topology topology, const NodeSession& session, const TcpMesh& mesh) {
  const int rank = mesh.rank();
  const bool fits = topology.size() == mesh.size() && session.rank() == topology.local_rank_of(rank) &&
                    session.size() == static_cast<int>(topology.ranks_of(topology.node_of(rank)).size());
  if (fits) return {std::move(topology), rank};
  throw Error("the list of nodes is of another group than its connections and memory: rank " + std::to_string(rank) +
              " of " + std::to_string(mesh.size()) + " is rank " + std::to_string(session.rank()) + " of " +
              std::to_string(session.size()) + " on its node");
}

/// The algorithms for several nodes know no domains, and all have to add up in the same order.
std::shared_ptr<NodeSession> united(std::shared_ptr<NodeSession> session) {
  session->unite();
  return session;
}

}  // namespace

HierarchicalGroup::HierarchicalGroup(Topology topology, std::shared_ptr<NodeSession> session,
                                     std::shared_ptr<TcpMesh> mesh, const HierarchicalLimits& limits)
    : map_(map_of(std::move(topology), *session, *mesh)),
      session_(united(std::move(session))),
      mesh_(std::move(mesh)),
      node_(session_, mesh_->plan().rules),
      flat_(mesh_),
      watch_(map_, session_),
      selection_(Selection::parse(mesh_->plan().rules)),
      parts_{map_,
             node_,
             node_.rounds(),
             mesh_->plan(),
             watch_,
             scratch_,
             limits.rails > 0 ? std::min(map_.least_local(), limits.rails) : map_.least_local(),
             limits.most_peers} {}

void HierarchicalGroup::check_usable(const Call& /*call*/) {
  share_failure(*mesh_, *session_);
  mesh_->check_usable();
}

void HierarchicalGroup::guarded(const Running& run, const std::function<void()>& body) {
  node_.rounds().places().forget();
  struct End {
    HierarchicalGroup& group;
    ~End() {
      group.watch_.set_call(nullptr);
      group.call_.reset();
    }
  };
  try {
    call_.emplace(*mesh_, facts_of(*mesh_, run));
    const End end{*this};
    watch_.set_call(&*call_);
    try {
      body();
      node_.rounds().places().end();
    } catch (...) {
      call_->fail(std::current_exception());
      throw;
    }
  } catch (const InvalidArgument&) {
    node_.rounds().places().end();
    throw;
  } catch (...) {
    // All ranks report the failure that was recorded first.
    fail(std::current_exception());
    node_.rounds().places().withdraw();
    node_.rounds().places().end();
    mesh_->failure().check();
    throw;
  }
}

// --- operations ------------------------------------------------------------------------------------------------------

void HierarchicalGroup::do_barrier(const Running& run) {
  HierarchicalRun now = run_of(run);
  now.open();
  now.agree();
}

void HierarchicalGroup::do_reduce(const Running& run, const Reducing& job) {
  HierarchicalRun now = run_of(run);
  hierarchical::reduce(now, selection_, job);
}

void HierarchicalGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  HierarchicalRun now = run_of(run);
  hierarchical::reduce_scatter(now, job);
}

void HierarchicalGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  HierarchicalRun now = run_of(run);
  switch (plan.movement) {
    case Movement::Broadcast:
      return hierarchical::broadcast(now, plan);
    case Movement::AllGather:
      return hierarchical::all_gather(now, plan);
    case Movement::Gather:
    case Movement::Scatter:
    case Movement::AllToAll:
      return hierarchical::exchange(now, plan);
  }
}

void HierarchicalGroup::monitored_barrier(const Call& call, bool wait_all_ranks) {
  share_failure(*mesh_, *session_);
  try {
    flat_.monitored_barrier(call, wait_all_ranks);
  } catch (...) {
    share_failure(*mesh_, *session_);
    throw;
  }
}

// --- failures --------------------------------------------------------------------------------------------------------

void HierarchicalGroup::fail(const std::exception_ptr& error) noexcept {
  flat_.fail(error);
  share_failure(*mesh_, *session_);
}

void HierarchicalGroup::refuse(const Call& call, const std::string& why) noexcept {
  node_.refuse(call, why);
  flat_.refuse(call, why);
}

void HierarchicalGroup::abort(const std::string& reason) {
  flat_.abort(reason);
  share_failure(*mesh_, *session_);
}

void HierarchicalGroup::leave() noexcept {
  session_->leave();
  mesh_->leave();
}

std::string HierarchicalGroup::failure() const {
  mesh_->look();
  share_failure(*mesh_, *session_);
  return mesh_->failure().message();
}

// --- the rest --------------------------------------------------------------------------------------------------------

std::vector<int> HierarchicalGroup::node_sizes() const {
  std::vector<int> sizes;
  sizes.reserve(static_cast<size_t>(map_.nodes()));
  for (int node = 0; node < map_.nodes(); ++node) sizes.push_back(static_cast<int>(map_.ranks_of(node).size()));
  return sizes;
}

std::shared_ptr<void> HierarchicalGroup::allocate(size_t bytes) {
  share_failure(*mesh_, *session_);
  return node_.allocate(bytes);
}

}  // namespace ours
