#pragma once

#include <functional>
#include <memory>
#include <string>

#include "collectives/group.h"
#include "collectives/node/node_rounds.h"
#include "collectives/select.h"
#include "common/options.h"
#include "transport/node/node_session.h"

namespace ours {

/// Collectives of ranks that share memory: the algorithms of node_algorithms.h, over common rounds.
class NodeGroup final : public Group {
 public:
  /// `rules`: the user's rules of the table of algorithms, the same on all ranks.
  explicit NodeGroup(std::shared_ptr<NodeSession> session, const std::string& rules = "",
                     Setting write_around = options().write_around);

  int rank() const override { return session_->rank(); }
  int size() const override { return session_->size(); }

  void monitored_barrier(const Call& call, bool wait_all_ranks) override;

  std::shared_ptr<void> allocate(size_t bytes) override;
  bool allocates() const override { return !session_->in_child() && session_->heap().allocates(); }
  MemoryUse memory_use() const override;
  void abort(const std::string& reason) override;
  void fail(const std::exception_ptr& error) noexcept override { session_->failure().fail(error); }
  void refuse(const Call& call, const std::string& why) noexcept override;
  void leave() noexcept override { session_->leave(); }
  bool can_begin() const override { return true; }
  bool has_begun() const override { return rounds_.has_begun(); }
  bool have_all_begun() const override { return rounds_.all_have_begun(); }
  std::string failure() const override { return session_->failure().message(); }

  /// For operations of a larger group that work within the node between two of their own synchronisations. They and
  /// the operations of this group must come in the same order on all ranks.
  NodeRounds& rounds() { return rounds_; }

 protected:
  void check_usable(const Call& call) override;
  void do_barrier(const Running& run) override { rounds_.open(run); }
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void guarded(const Running& run, const std::function<void()>& body) override;

 private:
  const std::shared_ptr<NodeSession> session_;
  NodeRounds rounds_;
  const Selection::BySize reductions_;
  uint32_t monitored_ = 0;  ///< monitored barriers so far
};

}  // namespace ours
