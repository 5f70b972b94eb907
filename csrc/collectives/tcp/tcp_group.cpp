#include "collectives/tcp/tcp_group.h"

#include <numeric>
#include <utility>

#include "collectives/tcp/dissemination.h"
#include "collectives/tcp/tcp_algorithms.h"

namespace ours {

TcpGroup::TcpGroup(std::shared_ptr<TcpMesh> mesh)
    : mesh_(std::move(mesh)), selection_(Selection::parse(mesh_->plan().rules)), all_(static_cast<size_t>(size())) {
  std::iota(all_.begin(), all_.end(), 0);
}

void TcpGroup::do_barrier(const Running& run) {
  TcpRun now = run_of(run);
  Dissemination all(now.members());
  now.tcp.run([&] { return all.advance(); });
}

void TcpGroup::do_reduce(const Running& run, const Reducing& job) {
  TcpRun now = run_of(run);
  tcp::reduce(now, selection_, job);
}

void TcpGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  TcpRun now = run_of(run);
  tcp::reduce_scatter(now, selection_, job);
}

void TcpGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  TcpRun now = run_of(run);
  if (plan.movement == Movement::Broadcast) return tcp::broadcast(now, plan);
  const bool gathers = plan.movement == Movement::AllGather;
  if (gathers && selection_.choose({Selectable::AllGather, size(), 1, 0}) == Algorithm::Ring) {
    return tcp::all_gather(now, plan);
  }
  tcp::exchange(now, plan);
}

void TcpGroup::monitored_barrier(const Call& call, bool wait_all_ranks) {
  mesh_->check_usable();
  tcp::monitored_barrier(*mesh_, call, ++monitored_, wait_all_ranks);
}

void TcpGroup::abort(const std::string& reason) {
  mesh_->fail(FailureKind::Aborted, aborted(mesh_->describe_self(), reason));
}

void TcpGroup::fail(const std::exception_ptr& error) noexcept { mesh_->fail(error); }

void TcpGroup::refuse(const Call& call, const std::string& why) noexcept {
  mesh_->refuse(call.seq, refusal_of(call, mesh_->describe_self(), why));
}

std::string TcpGroup::failure() const {
  mesh_->look();
  return mesh_->failure().message();
}

}  // namespace ours
