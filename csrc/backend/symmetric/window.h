#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

#include <memory>

#include "backend/symmetric/symmetric_group.h"
#include "transport/node/signal_counters.h"

namespace ours {

/// c10d's one-sided access to the tensors of other ranks, for ranks of one node: put() copies into the memory of the
/// peer, which need not take part. The tensors have to be in symmetric memory. Signals are counted for each pair of
/// ranks: signal() never waits, and each wait_signal() takes one.
class OursWindow final : public c10d::Window {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit OursWindow(std::shared_ptr<SymmetricGroup> group) : group_(std::move(group)) {}

  /// Tensors of the ranks may differ in size and type. The memory lasts as long as the window, or until
  /// tensor_deregister(); `owning` also keeps the tensor.
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  /// Returns when all ranks have called it.
  void tensor_deregister() override;

  /// Copies now, so the Work, which is null for a synchronous call, has ended.
  WorkPtr put(const at::Tensor& tensor, int64_t dst_rank, int64_t target_offset, bool async_op,
              const c10d::PutOptions& opts) override;
  /// The tensor of the peer as a flat one, which keeps the memory.
  at::Tensor map_remote_tensor(int64_t rank) override;
  WorkPtr signal(int64_t peer_rank, bool async_op, const c10d::SignalOptions& opts) override;
  WorkPtr wait_signal(int64_t peer_rank, bool async_op, const c10d::WaitSignalOptions& opts) override;
  c10d::WindowAttr get_attr(int64_t peer_rank) override;

 private:
  /// What is registered. Works share it.
  struct Registered;
  class SignalWork;

  const Registered& registered() const;
  void check_peer(int64_t rank) const;

  const std::shared_ptr<SymmetricGroup> group_;
  std::shared_ptr<Registered> registered_;
};

}  // namespace ours

#endif  // C10D_BACKEND_HAS_WINDOW
