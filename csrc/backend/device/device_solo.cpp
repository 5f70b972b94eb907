#include "backend/device/device_solo.h"

#include <string>

#include "common/error.h"

namespace ours {

namespace {

class DeviceSoloGroup final : public Group {
 public:
  DeviceSoloGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, std::shared_ptr<DeviceStream> stream)
      : host_(std::move(host)), device_(std::move(device)), stream_(std::move(stream)) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }

  void barrier(const Call& call) override { host_->barrier(call); }

  void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) override {
    give(call, in, out, count, reduction);
    await(call);
  }

  void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) override {
    for (const Span& piece : pieces) {
      give(call, piece.data, piece.data, piece.bytes / size_of(call.dtype), reduction);
    }
    await(call);
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

  void broadcast(const Call& call, Span, int root) override {
    check_root(root);
    check_alive(call);
  }

  void all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) override {
    copy(call, input, outputs.at(0));
  }

  void gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) override {
    check_root(root);
    copy(call, input, outputs.at(0));
  }

  void scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) override {
    check_root(root);
    copy(call, inputs.at(0), output);
  }

  void all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) override {
    copy(call, inputs.at(0), outputs.at(0));
  }

  void monitored_barrier(const Call& call, bool wait_all_ranks) override {
    host_->monitored_barrier(call, wait_all_ranks);
  }

  std::shared_ptr<void> allocate(size_t) override { return nullptr; }
  void abort(const std::string& reason) override { host_->abort(reason); }
  void fail(const std::exception_ptr& error) noexcept override { host_->fail(error); }
  void refuse(const Call& call, const std::string& why) noexcept override { host_->refuse(call, why); }
  void leave() noexcept override {}
  std::string failure() const override { return host_->failure(); }

 private:
  void check_alive(const Call& call) const {
    // A group that has failed throws that at once, whatever is called.
    if (!host_->failure().empty()) host_->barrier(call);
  }

  static void check_root(int root) {
    if (root == 0) return;
    throw InvalidArgument("root is " + std::to_string(root) + " in a group of one rank; give rank 0");
  }

  void give(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
    check_supported(reduction.kind, call.dtype);
    check_alive(call);
    if (count == 0) return;
    // Not a plain copy: PREMUL_SUM multiplies even a single input.
    device_->reduce({out}, {in}, count, call.dtype, reduction, stream_->handle());
  }

  void copy(const Call& call, ConstSpan from, Span to) {
    check_alive(call);
    if (from.bytes != to.bytes) {
      throw InvalidArgument("the input has " + std::to_string(from.bytes) + " bytes and the output " +
                            std::to_string(to.bytes) + "; give them the same size");
    }
    if (from.bytes == 0 || from.data == to.data) return;
    device_->copy(to.data, from.data, from.bytes, stream_->handle());
    await(call);
  }

  void await(const Call& call) {
    const auto event = device_->make_event();
    event->record(stream_->handle());
    wait_reached(*event, call.deadline, [&] { check_alive(call); }, name_of(call.op));
  }

  const std::shared_ptr<Group> host_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<DeviceStream> stream_;
};

}  // namespace

std::shared_ptr<Group> make_device_solo_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                                              std::shared_ptr<DeviceStream> stream) {
  return std::make_shared<DeviceSoloGroup>(std::move(host), std::move(device), std::move(stream));
}

}  // namespace ours
