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

  void barrier(const Call& call) override;
  void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) override;
  void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) override;
  void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root) override;
  void reduce_scatter(const Call& call, const std::vector<const void*>& inputs, const std::vector<size_t>& counts,
                      void* out, const Reduction& reduction) override;
  void broadcast(const Call& call, Span buffer, int root) override;
  void all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) override;
  void gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) override;
  void scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) override;
  void all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) override;
  void monitored_barrier(const Call& call, bool wait_all_ranks) override;

  /// Null: no memory saves a copy here.
  std::shared_ptr<void> allocate(size_t bytes) override;
  void abort(const std::string& reason) override;
  void fail(const std::exception_ptr& error) noexcept override;
  void refuse(const Call& call, const std::string& why) noexcept override;
  void leave() noexcept override { mesh_->leave(); }
  std::vector<int> node_sizes() const override { return std::vector<int>(static_cast<size_t>(size()), 1); }
  std::string failure() const override;

 private:
  /// A reduction of an array in as many slices as there are ranks, each of which one rank reduces.
  struct Reducing {
    DType dtype;
    Reduction reduction;
    std::vector<const std::byte*> inputs;  ///< this rank's input of each slice
    std::vector<size_t> counts;            ///< elements of each slice
    std::vector<std::byte*> outputs;       ///< where each reduced slice goes; null: nowhere but its reducer
    std::vector<int> readers;              ///< which ranks want all slices
  };

  /// What this rank sends to, and gets from, each rank. A message may be empty, which is not the same as none.
  struct Exchange {
    std::vector<std::optional<ConstSpan>> sends;
    std::vector<std::optional<Span>> receives;
  };

  /// Runs `body`; whatever it throws, but for InvalidArgument, becomes the failure of the group.
  template <class Body>
  void guarded(Body&& body);
  TcpCall::Facts facts_of(const Call& call, const CallRecord& record, uint64_t fingerprint = 0) const;
  /// Every rank has a node of its own.
  Algorithm choose(Selectable operation, size_t bytes) const {
    return selection_.choose({operation, size(), 1, bytes});
  }

  /// Of all ranks' `in` into `out`, which is null where this rank does not want it. Root -1: all do.
  void reduce_to(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                 const Reduction& reduction, int root);
  void reduce_array(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                    size_t count, int root);
  void reduce_whole(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                    size_t count);
  void reduce_direct(TcpCall& tcp, const Reducing& job);
  void reduce_ring(TcpCall& tcp, const Reducing& job);
  void reduce_doubling(TcpCall& tcp, DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out,
                       size_t count);

  void exchange_checked(const Call& call, const CallRecord& record, const Exchange& plan);
  void exchange(const Call& call, const CallRecord& record, const Exchange& plan);
  void all_gather_ring(const Call& call, ConstSpan input, const std::vector<Span>& outputs);

  /// `bytes` bytes that last until the next call of this.
  std::byte* scratch(size_t bytes);

  std::shared_ptr<TcpMesh> mesh_;
  const Selection selection_;
  std::vector<std::byte> scratch_;
  uint64_t monitored_ = 0;  ///< monitored barriers so far
};

}  // namespace ours
