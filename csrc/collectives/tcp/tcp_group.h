#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/pieces.h"
#include "collectives/select.h"
#include "common/partition.h"
#include "transport/node/node_layout.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// Collectives of ranks that need not share memory, over TCP. Several groups of one process are independent of each
/// other; each is driven by the threads that call it.
///
/// The algorithms, one a file: tcp_reduce_direct.cpp, tcp_reduce_ring.cpp and doubling.cpp (all that reduces),
/// tcp_broadcast.cpp, tcp_exchange.cpp (gather, scatter, all_gather, all_to_all),
/// tcp_barrier.cpp, tcp_monitored_barrier.cpp.
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
  /// A reduction of an array in as many slices as there are ranks, each of which one rank reduces.
  struct Slices {
    DType dtype;
    Reduction reduction;
    std::vector<const std::byte*> inputs;  ///< this rank's input of each slice
    std::vector<size_t> counts;            ///< elements of each slice
    std::vector<std::byte*> outputs;       ///< where each reduced slice goes; null: nowhere but its reducer
    std::vector<int> readers;              ///< which ranks want all slices
  };

  /// Every rank has a node of its own.
  Algorithm choose(Selectable operation, size_t bytes) const {
    return selection_.choose({operation, size(), 1, bytes});
  }

  void reduce_array(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                    size_t count, int root);
  void reduce_whole(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                    size_t count);
  void reduce_direct(TcpCall& tcp, const Slices& job);
  void reduce_ring(TcpCall& tcp, const Slices& job);
  void reduce_doubling(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                       size_t count);

  void broadcast_plan(const Running& run, const ExchangePlan& plan);
  void exchange_directly(const Running& run, const ExchangePlan& plan);
  void all_gather_ring(const Running& run, const ExchangePlan& plan);

  /// `bytes` bytes that last until the next call of this.
  std::byte* scratch(size_t bytes);

  std::shared_ptr<TcpMesh> mesh_;
  const Selection selection_;
  std::vector<std::byte> scratch_;
  uint64_t monitored_ = 0;  ///< monitored barriers so far
};

}  // namespace ours
