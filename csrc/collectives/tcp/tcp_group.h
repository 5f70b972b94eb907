#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/scratch.h"
#include "collectives/select.h"
#include "collectives/tcp/tcp_run.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// Collectives of ranks that need not share memory, over TCP: the algorithms of tcp_algorithms.h. Several groups of one
/// process are independent of each other; each is driven by the threads that call it.
class TcpGroup final : public Group {
 public:
  explicit TcpGroup(std::shared_ptr<TcpMesh> mesh);
  TcpGroup(const TcpGroup&) = delete;
  TcpGroup& operator=(const TcpGroup&) = delete;
  ~TcpGroup() override { mesh_->leave(); }

  int rank() const override { return mesh_->rank(); }
  int size() const override { return mesh_->size(); }

  void monitored_barrier(const Call& call, bool wait_all_ranks) override;

  void abort(const std::string& reason) override;
  void fail(const std::exception_ptr& error) noexcept override;
  void refuse(const Call& call, const std::string& why) noexcept override;
  void leave() noexcept override { mesh_->leave(); }
  std::vector<int> node_sizes() const override { return std::vector<int>(static_cast<size_t>(size()), 1); }
  std::string failure() const override;

 protected:
  void check_usable(const Call& /*call*/) override { mesh_->check_usable(); }
  void do_barrier(const Running& run) override;
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;

 private:
  TcpRun run_of(const Running& run) { return {*mesh_, run, scratch_, all_}; }

  const std::shared_ptr<TcpMesh> mesh_;
  const Selection selection_;
  Scratch scratch_;
  std::vector<int> all_;    ///< the ranks, 0 to size() - 1
  uint64_t monitored_ = 0;  ///< monitored barriers so far
};

}  // namespace ours
