#include "backend/solo.h"

#include <cstring>
#include <mutex>

#include "common/error.h"

namespace ours {

namespace {

class SoloGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

  void barrier(const Call&) override { check_alive(); }

  void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) override {
    check_supported(reduction.kind, call.dtype);
    check_alive();
    // Not a plain copy: PREMUL_SUM multiplies even a single input.
    ours::reduce(out, &in, 1, count, call.dtype, reduction);
  }

  void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) override {
    for (const Span& piece : pieces) {
      all_reduce(call, piece.data, piece.data, piece.bytes / size_of(call.dtype), reduction);
    }
  }

  void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
              int root) override {
    check_root(root);
    all_reduce(call, in, out, count, reduction);
  }

  void reduce_scatter(const Call& call, const std::vector<const void*>& inputs, const std::vector<size_t>& counts,
                      void* out, const Reduction& reduction) override {
    all_reduce(call, inputs.at(0), out, counts.at(0), reduction);
  }

  void broadcast(const Call&, Span, int root) override {
    check_root(root);
    check_alive();
  }

  void all_gather(const Call&, ConstSpan input, const std::vector<Span>& outputs) override {
    copy(input, outputs.at(0));
  }

  void gather(const Call&, ConstSpan input, const std::vector<Span>& outputs, int root) override {
    check_root(root);
    copy(input, outputs.at(0));
  }

  void scatter(const Call&, const std::vector<ConstSpan>& inputs, Span output, int root) override {
    check_root(root);
    copy(inputs.at(0), output);
  }

  void all_to_all(const Call&, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) override {
    copy(inputs.at(0), outputs.at(0));
  }

  void monitored_barrier(const Call&, bool) override { check_alive(); }

  std::shared_ptr<void> allocate(size_t) override { return nullptr; }
  bool allocates() const override { return true; }  // in any memory a reduction in place copies nothing

  void abort(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = "rank 0 aborted the group" + (reason.empty() ? "" : ": " + reason);
  }

  // There is nobody to fall out of step with.
  void fail(const std::exception_ptr&) noexcept override {}

  void refuse(const Call&, const std::string&) noexcept override {}

  void leave() noexcept override {}

  std::string failure() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  void check_alive() const {
    const std::string message = failure();
    if (!message.empty()) throw AbortedError(message);
  }

  static void check_root(int root) {
    if (root != 0) {
      throw InvalidArgument("root is " + std::to_string(root) + " in a group of one rank; give rank 0");
    }
  }

  void copy(ConstSpan from, Span to) const {
    check_alive();
    if (from.bytes != to.bytes) {
      throw InvalidArgument("the input has " + std::to_string(from.bytes) + " bytes and the output " +
                            std::to_string(to.bytes) + "; give them the same size");
    }
    if (from.bytes != 0 && from.data != to.data) std::memmove(to.data, from.data, from.bytes);
  }

  mutable std::mutex mutex_;
  std::string failure_;  // guarded by mutex_
};

class SoloPointToPoint final : public PointToPoint {
 public:
  std::shared_ptr<Transfer> send(ConstSpan, DType, int, int, TransferLimitPtr, TransferDone) override { refuse(); }
  std::shared_ptr<Transfer> recv(Span, DType, int, int, TransferLimitPtr, TransferDone) override { refuse(); }
  void wait(Transfer&) override {}
  bool busy() override { return false; }
  void close() noexcept override {}
  bool wait_closed(std::chrono::milliseconds) override { return true; }

 private:
  [[noreturn]] static void refuse() { throw InvalidArgument("send or recv in a group of one rank: there is no peer"); }
};

}  // namespace

std::shared_ptr<Group> make_solo_group() { return std::make_shared<SoloGroup>(); }

std::shared_ptr<PointToPoint> make_solo_point_to_point() { return std::make_shared<SoloPointToPoint>(); }

}  // namespace ours
