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

  void monitored_barrier(const Call& call, bool wait_all_ranks) override {
    host_->monitored_barrier(call, wait_all_ranks);
  }

  void abort(const std::string& reason) override { host_->abort(reason); }
  void fail(const std::exception_ptr& error) noexcept override { host_->fail(error); }
  void refuse(const Call& call, const std::string& why) noexcept override { host_->refuse(call, why); }
  void leave() noexcept override {}
  std::string failure() const override { return host_->failure(); }

 protected:
  void check_usable(const Call& call) override {
    // A group that has failed throws that at once, whatever is called.
    if (!host_->failure().empty()) host_->barrier(call);
  }

  void do_barrier(const Running& run) override { host_->barrier(run.call); }

  void do_reduce(const Running& run, const Reducing& job) override {
    const size_t element = size_of(run.call.dtype);
    job.in.visit(0, job.in.count(), [&](std::byte* data, size_t at, size_t count) {
      void* const out = job.out == &job.in ? data : job.out->whole() + at * element;
      give(run.call, data, out, count, job.reduction);
    });
    await(run.call);
  }

  void do_reduce_scatter(const Running& run, const Scattering& job) override {
    give(run.call, job.inputs[0], job.out, job.counts[0], job.reduction);
    await(run.call);
  }

  void do_exchange(const Running& run, const ExchangePlan& plan) override {
    const ConstSpan& from = *plan.sends[0];
    const Span& to = *plan.receives[0];
    if (from.bytes == 0 || from.data == to.data) return;
    device_->copy(to.data, from.data, from.bytes, stream_->handle());
    await(run.call);
  }

 private:
  void give(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
    if (count == 0) return;
    // Not a plain copy: PREMUL_SUM multiplies even a single input.
    device_->reduce({out}, {in}, count, call.dtype, reduction, stream_->handle());
  }

  void await(const Call& call) {
    const auto event = device_->make_event();
    event->record(stream_->handle());
    wait_reached(*event, call.deadline, [&] { check_usable(call); }, name_of(call.op));
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
