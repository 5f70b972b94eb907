#include "collectives/solo/solo.h"

#include <mutex>

#include "common/error.h"
#include "transport/failure_kind.h"

namespace ours {

namespace {

class SoloGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

  void monitored_barrier(const Call& call, bool) override { check_usable(call); }

  bool allocates() const override { return true; }  // a single rank reduces in place in any memory

  void abort(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = aborted("rank 0", reason);
  }

  // A single rank cannot fall out of step.
  void fail(const std::exception_ptr&) noexcept override {}

  void refuse(const Call&, const std::string&) noexcept override {}

  void leave() noexcept override {}

  std::string failure() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 protected:
  void check_usable(const Call&) override {
    const std::string message = failure();
    if (!message.empty()) throw AbortedError(message);
  }

  void do_barrier(const Running&) override {}

  void do_reduce(const Running& run, const Reducing& job) override {
    const size_t element = size_of(run.call.dtype);
    job.in.visit(0, job.in.count(), [&](std::byte* data, size_t at, size_t count) {
      const void* const in = data;
      void* const out = job.out == &job.in ? data : job.out->whole() + at * element;
      // Not a plain copy: PREMUL_SUM multiplies even a single input.
      ours::reduce(out, &in, 1, count, run.call.dtype, job.reduction);
    });
  }

  void do_reduce_scatter(const Running& run, const Scattering& job) override {
    ours::reduce(job.out, job.inputs.data(), 1, job.counts[0], run.call.dtype, job.reduction);
  }

  void do_exchange(const Running&, const ExchangePlan& plan) override { plan.copy_own(0); }

 private:
  mutable std::mutex mutex_;
  std::string failure_;  // guarded by mutex_
};

class SoloPointToPoint final : public PointToPoint {
 public:
  std::shared_ptr<Transfer> send(ConstSpan, DType, int, int, TransferLimitPtr, TransferDone) override { refuse(); }
  std::shared_ptr<Transfer> recv(Span, DType, int, int, TransferLimitPtr, TransferDone) override { refuse(); }
  void wait(Transfer&) override {}
  void attend() override {}
  void call(TransferCallbacks callbacks) override { callbacks(); }
  void close() noexcept override {}
  bool wait_closed(std::chrono::milliseconds) override { return true; }

 private:
  [[noreturn]] static void refuse() { throw InvalidArgument("send or recv in a group of one rank: there is no peer"); }
};

}  // namespace

std::shared_ptr<Group> make_solo_group() { return std::make_shared<SoloGroup>(); }

std::shared_ptr<PointToPoint> make_solo_point_to_point() { return std::make_shared<SoloPointToPoint>(); }

}  // namespace ours
