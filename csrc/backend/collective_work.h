#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "backend/comm_queue.h"
#include "backend/work.h"
#include "collectives/group.h"

namespace ours {

/// A collective to run: what it is, its memory, and what to do with it.
struct Collective {
  Op op;
  DType dtype = DType::UInt8;
  bool async_op = true;
  std::chrono::milliseconds timeout{-1};  ///< < 0: the group's
  std::vector<at::Tensor> inputs;
  std::vector<std::vector<at::Tensor>> outputs;
  /// Does the operation; owns all tensors that it touches.
  std::function<void(Group&, const Call&)> body;
};

/// One collective of a group, run by its CommQueue.
class CollectiveWork final : public OursWork {
 public:
  CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                 std::shared_ptr<GroupStatus> status);

  /// Blocks until the operation has ended and throws its error. A `timeout` (0: none) that passes before throws too,
  /// and leaves the operation and the group as they are.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// The number of the collective in its group; before execute().
  using OursWork::set_sequence;

  /// Runs the operation and completes the Work, but for its callbacks. Called once, by the queue.
  void execute() noexcept;

  using OursWork::has_callbacks;
  using OursWork::run_callbacks;

 private:
  const DType dtype_;
  std::function<void(Group&, const Call&)> body_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<CommQueue> queue_;
};

}  // namespace ours
