#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/callback.h"

namespace ours {

class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;

  /// The error of the first Work that failed.
  std::exception_ptr exception() const override;

  /// Waits for all Works, even if one fails, and then throws the first error. `timeout` limits the whole wait.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  void synchronize() override;

  std::vector<at::Tensor> result() override;

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Where the callbacks on its future belong; none if all of its Works are transfers.
  std::optional<Origin> origin() const;

  uint64_t getSequencenumber() const override { return works_.empty() ? 0 : works_.back()->getSequencenumber(); }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

/// Collects the Works that a thread issues between startCoalescing() and endCoalescing().
class Coalescing {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  void start();
  /// Returns whether this thread is collecting, and then keeps `work`.
  bool add(const WorkPtr& work);
  WorkPtr end();

 private:
  std::mutex mutex_;
  std::map<std::thread::id, std::vector<WorkPtr>> works_;  // guarded by mutex_; by collecting thread
  std::atomic<bool> collects_{false};                      // whether any thread does
};

}  // namespace ours
