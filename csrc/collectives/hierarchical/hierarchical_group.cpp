#include "collectives/hierarchical/hierarchical_group.h"

#include <algorithm>
#include <utility>

#include "collectives/node/node_group_impl.h"
#include "collectives/tcp/tcp_group_impl.h"

namespace ours {

namespace {

/// The ranks of the smallest node, and of the largest one.
std::pair<int, int> extremes(const Topology& topology) {
  std::vector<size_t> sizes;
  sizes.reserve(static_cast<size_t>(topology.nodes()));
  for (int node = 0; node < topology.nodes(); ++node) sizes.push_back(topology.ranks_of(node).size());
  const auto found = std::minmax_element(sizes.begin(), sizes.end());
  return {static_cast<int>(*found.first), static_cast<int>(*found.second)};
}

}  // namespace

HierarchicalGroup::HierarchicalGroup(Topology topology, std::shared_ptr<NodeSession> session,
                                     std::shared_ptr<TcpMesh> mesh, Plan plan)
    : topology_(std::move(topology)),
      session_(std::move(session)),
      mesh_(std::move(mesh)),
      node_(session_, plan.write_around),
      flat_(mesh_),
      node_index_(topology_.node_of(mesh_->rank())),
      local_(topology_.local_rank_of(mesh_->rank())),
      rails_(extremes(topology_).first),
      selection_(Selection::parse(mesh_->plan().rules)),
      most_local_(extremes(topology_).second) {
  if (topology_.size() != mesh_->size() || session_->size() != static_cast<int>(members().size()) ||
      session_->rank() != local_) {
    throw Error("the list of nodes is of another group than its connections and memory: rank " +
                std::to_string(mesh_->rank()) + " of " + std::to_string(mesh_->size()) + " is rank " +
                std::to_string(session_->rank()) + " of " + std::to_string(session_->size()) + " on its node");
  }
  if (plan.rails > 0) rails_ = std::min(rails_, plan.rails);
  for (int node = 0; node < nodes(); ++node) leaders_.push_back(topology_.ranks_of(node)[0]);
  session_->widen(members(), this);
}

HierarchicalGroup::~HierarchicalGroup() {
  leave();
  session_->widen(members(), nullptr);
}

void HierarchicalGroup::check_usable(const Call& /*call*/) {
  share_failure();
  mesh_->check_usable();
}

void HierarchicalGroup::guarded(const Running& run, const std::function<void()>& body) {
  node_.exposed_.reset();
  try {
    struct End {
      std::optional<TcpCall>& tcp;
      ~End() { tcp.reset(); }
    };
    tcp_.emplace(*mesh_, facts_of(mesh_, run));
    const End end{tcp_};
    try {
      body();
    } catch (...) {
      tcp_->fail(std::current_exception());
      throw;
    }
  } catch (const InvalidArgument&) {
    throw;
  } catch (...) {
    // One story on all ranks: what was recorded first.
    fail(std::current_exception());
    node_.withdraw();
    mesh_->failure().check();
    throw;
  }
}

void HierarchicalGroup::do_barrier(const Running& run) {
  const Stride now = stride(run);
  open(now);
  agree(now);
}

void HierarchicalGroup::monitored_barrier(const Call& call, bool wait_all_ranks) {
  share_failure();
  try {
    flat_.monitored_barrier(call, wait_all_ranks);
  } catch (...) {
    share_failure();
    throw;
  }
}

// --- the node and the network ----------------------------------------------------------------------------------------

void HierarchicalGroup::open(const Stride& run) {
  run.tcp.away([&] {
    node_.publish_record(run.record);
    node_.sync(run.call, run.record);
    node_.check_records(run.record);
  });
}

void HierarchicalGroup::sync(const Stride& run) {
  if (session_->size() > 1) {
    run.tcp.away([&] { node_.sync(run.call, run.record); });
  } else {
    node_.sync(run.call, run.record);
  }
}

void HierarchicalGroup::agree(const Stride& run) {
  if (is_leader()) agree_among_leaders(run, 0);
  sync(run);
}

void HierarchicalGroup::agree_among_leaders(const Stride& run, uint32_t first_round) {
  Dissemination all(run.tcp, leaders_, node_index_, first_round);
  wait(run, [&] { return all.advance(); });
}

void HierarchicalGroup::wait(const Stride& run, const std::function<bool()>& done, bool needs_node) {
  run.tcp.run([&] {
    if (done()) return true;
    if (needs_node) watch_node(run);
    return false;
  });
}

void HierarchicalGroup::push(const Stride& run) {
  run.tcp.run([] { return true; });
}

void HierarchicalGroup::watch_node(const Stride& run) {
  session_->failure().check();
  const auto now = Clock::now();
  if (now < next_watch_) return;
  next_watch_ = now + kLookAround / 2;
  for (int r = 0; r < session_->size(); ++r) {
    const char* why = r == local_ ? nullptr : session_->absence(r);
    if (why != nullptr) session_->lost(r, why, run.tcp.what());
  }
  if (run.tcp.half_over()) publish_causes(run.tcp);
}

void HierarchicalGroup::publish_causes(const TcpCall& tcp) {
  const std::vector<uint32_t> causes = tcp.causes();
  RankBlock& self = session_->self();
  for (size_t i = 0; i < kMostBlamed; ++i) {
    self.blamed[i].store(i < causes.size() ? static_cast<int32_t>(causes[i]) : -1, std::memory_order_relaxed);
  }
  // Release: who reads this number reads the list, or a newer one.
  self.blame_call.store(tcp.number(), std::memory_order_release);
}

std::vector<uint32_t> HierarchicalGroup::causes_of(const std::vector<int>& absent) const {
  std::vector<uint32_t> causes;
  for (const int r : absent) {
    const RankBlock& peer = session_->block(r);
    const size_t known = causes.size();
    if (tcp_ && peer.blame_call.load(std::memory_order_acquire) == tcp_->number()) {
      for (const auto& blamed : peer.blamed) {
        const int32_t rank = blamed.load(std::memory_order_relaxed);
        if (rank < 0 || rank >= size()) break;
        if (rank != this->rank()) causes.push_back(static_cast<uint32_t>(rank));
      }
    }
    if (causes.size() == known) causes.push_back(static_cast<uint32_t>(session_->number_of(r)));
  }
  std::sort(causes.begin(), causes.end());
  causes.erase(std::unique(causes.begin(), causes.end()), causes.end());
  return causes;
}

void HierarchicalGroup::look_around(const std::vector<int>& absent) {
  if (tcp_) tcp_->look(causes_of(absent));
}

std::string HierarchicalGroup::culprits(const std::vector<int>& absent) {
  std::string names;
  std::vector<uint32_t> elsewhere;
  for (const uint32_t rank : causes_of(absent)) {
    const auto number = static_cast<int>(rank);
    if (topology_.node_of(number) != node_index_) {
      elsewhere.push_back(rank);
    } else {
      names += (names.empty() ? "" : ", ") + session_->describe(topology_.local_rank_of(number));
    }
  }
  if (elsewhere.empty() || !tcp_) return names;
  return (names.empty() ? "" : names + ", ") + tcp_->names_of(elsewhere);
}

// --- failures --------------------------------------------------------------------------------------------------------

void HierarchicalGroup::share_failure() const noexcept {
  const TcpFailure& outside = mesh_->failure();
  NodeFailure& inside = session_->failure();
  if (session_->in_child() || (!outside.failed() && !inside.failed())) return;
  try {
    if (!outside.failed()) mesh_->fail(inside.kind(), inside.message());
    if (!inside.failed()) inside.fail(outside.kind(), outside.message());
  } catch (const std::exception&) {
    // Out of memory: the next look tries again.
  }
}

void HierarchicalGroup::fail(const std::exception_ptr& error) noexcept {
  flat_.fail(error);
  share_failure();
}

void HierarchicalGroup::refuse(const Call& call, const std::string& why) noexcept {
  node_.refuse(call, why);
  flat_.refuse(call, why);
}

void HierarchicalGroup::abort(const std::string& reason) {
  flat_.abort(reason);
  share_failure();
}

void HierarchicalGroup::leave() noexcept {
  session_->leave();
  mesh_->leave();
}

std::string HierarchicalGroup::failure() const {
  mesh_->look();
  share_failure();
  return mesh_->failure().message();
}

std::vector<int> HierarchicalGroup::node_sizes() const {
  std::vector<int> sizes;
  sizes.reserve(static_cast<size_t>(nodes()));
  for (int node = 0; node < nodes(); ++node) sizes.push_back(static_cast<int>(topology_.ranks_of(node).size()));
  return sizes;
}

std::shared_ptr<void> HierarchicalGroup::allocate(size_t bytes) {
  share_failure();
  return node_.allocate(bytes);
}

std::byte* HierarchicalGroup::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_ = std::vector<std::byte>(bytes);
  return scratch_.data();
}

void HierarchicalGroup::give_scratch(Rail& rail) {
  const size_t slices = rail.slots() * rail.slice_bytes();
  std::byte* const memory = scratch(slices + rail.work_bytes());
  rail.use(memory, rail.slice_bytes(), memory + slices);
}

}  // namespace ours
