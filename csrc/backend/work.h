#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/group_status.h"
#include "collectives/messages/transfer_limit.h"
#include "collectives/op.h"
#include "common/interval.h"

namespace ours {

/// What all Works of this backend share: results, the future, times, and the calls of the group's hooks.
class OursWork : public c10d::Work, public Timed {
 public:
  using Clock = std::chrono::steady_clock;

  bool isCompleted() override {
    attend();
    return done();
  }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override {}

  /// The output tensors. Throws while the Work is under way, unless they are on a device, whose streams can wait for
  /// it. Throws for lists of lists; use getFuture() for those.
  std::vector<at::Tensor> result() override;

  /// A future that completes with the Work, with its error if it fails; or at once if the Work is enqueued on a device:
  /// callbacks run in streams that come after it. They run on the thread that completes the Work, which must not hold
  /// up anything that they may wait for.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// The operation's duration in milliseconds.
  float getDuration() const override;

  /// When the operation ran, once it has ended.
  std::optional<Interval> interval() const override;

  uint64_t getSequencenumber() const override { return sequence_; }

  // Virtual only in later versions of PyTorch, hence without `override`.
  std::chrono::milliseconds getTimeout() const { return timeout_; }
  uint64_t getCompletionKey() const { return key_; }

  /// Sets its entry in the FlightRecorder, if there is one. Called before it starts.
  void set_flight(std::optional<FlightLog::Entry> flight) { flight_ = flight; }

  /// A signal handler has raised `name` while this rank waited for the Work: fails the group, here and on the peers.
  void interrupt(const std::string& name) const;

  bool done() const { return done_.load(std::memory_order_acquire); }

 protected:
  /// The devices whose streams have to run callbacks after the Work: those of the outputs; empty for the CPU.
  virtual std::vector<at::Device> devices() const;

  /// Calls `body`, which completes the future, with the stream as the current one that callbacks have to come after.
  virtual void in_stream(const std::function<void()>& body) const { body(); }

  /// Whether that stream comes after the Work even before the host knows that it has ended.
  virtual bool is_enqueued() const { return false; }

  /// Sees to it that the operation goes on although nobody waits for it here.
  virtual void attend() const = 0;

  /// Whether it had begun before the thread that ends it came for that.
  virtual bool has_begun_before() const { return false; }

  using Outputs = std::vector<std::vector<at::Tensor>>;

  /// The shapes of `inputs` appear in profiles. `requested_timeout` < 0: the group's timeout.
  OursWork(Op op, int rank, std::shared_ptr<GroupStatus> status, const std::vector<at::Tensor>& inputs, Outputs outputs,
           std::chrono::milliseconds requested_timeout);

  void set_sequence(uint64_t sequence) {
    sequence_ = sequence;
    if (flight_) flight_->sequence = sequence;
  }
  /// When the program asked for it.
  Clock::time_point called() const { return called_; }
  Clock::time_point started() const { return started_; }
  void set_started();

  /// Ends the Work, except for its future. Called once. `error` may be one of the torch-free layers. Returns what
  /// has_callbacks() says at that moment.
  bool complete(const std::exception_ptr& error, Clock::time_point ended = Clock::now()) noexcept;

  /// Whether there is a future that has yet to be completed.
  bool has_callbacks() const;

  /// Called after complete(): completes the future, if there is one, and so runs its callbacks.
  void run_callbacks() noexcept;

  /// For a transfer, called after getFuture(): lets `limit` end the future with an error while the transfer goes on.
  void watch_future(TransferLimit& limit);

  GroupStatus& status() const { return *status_; }

  /// Throws what a signal handler raised while this thread waited; otherwise rethrows the Work's error, if it has one.
  void rethrow() const;

  /// Waits until the Work is done. Returns false if `timeout` (0: none) passed first. If a signal handler raises, fails
  /// the group and throws that.
  bool await_done(std::chrono::milliseconds timeout);

  [[noreturn]] void throw_wait_timeout(std::chrono::milliseconds waited) const;

  const Op op_;

 private:
  void add_to_timeline() const;
  bool has_callbacks(const std::lock_guard<std::mutex>& held) const;
  /// Completes the future with the results or the error. Called once the Work is done, or enqueued on a device.
  void settle(c10::ivalue::Future& future) const;
  void tell_hooks() noexcept;

  const std::shared_ptr<GroupStatus> status_;
  const Outputs outputs_;
  const uint64_t key_;
  const std::chrono::milliseconds timeout_;
  uint64_t sequence_ = 0;
  std::optional<FlightLog::Entry> flight_;
  const Clock::time_point called_ = Clock::now();
  Clock::time_point started_ = called_;
  Clock::time_point ended_ = started_;
  std::atomic<bool> done_{false};                   // from then on exception_ is read without mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_; made on demand
  bool watched_ = false;                            // guarded by mutex_
};

/// A Work without results that is done.
c10::intrusive_ptr<c10d::Work> completed_work();

}  // namespace ours
