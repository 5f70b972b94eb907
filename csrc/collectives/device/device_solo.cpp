#include "collectives/device/device_solo.h"

#include <utility>

namespace ours {

namespace {

class DeviceSoloGroup final : public EnqueueGroup {
 public:
  DeviceSoloGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
      : EnqueueGroup(std::move(host), std::move(device)) {}
  ~DeviceSoloGroup() override { end(); }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override {
    claim(run);
    const size_t element = size_of(run.call.dtype);
    job.in.visit(0, job.in.count(), [&](std::byte* data, size_t at, size_t count) {
      void* const out = job.out == &job.in ? data : job.out->whole() + at * element;
      give(run.call, data, out, count, job.reduction);
    });
  }

  void do_reduce_scatter(const Running& run, const Scattering& job) override {
    claim(run);
    give(run.call, job.inputs[0], job.out, job.counts[0], job.reduction);
  }

  void do_exchange(const Running& run, const ExchangePlan& plan) override {
    claim(run);
    const ConstSpan& from = *plan.sends[0];
    const Span& to = *plan.receives[0];
    if (from.bytes != 0 && from.data != to.data) device().copy(to.data, from.data, from.bytes, stream());
  }

 private:
  void give(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) const {
    // A plain copy would not do: PREMUL_SUM multiplies even a single input.
    if (count != 0) device().reduce({out}, {in}, count, call.dtype, reduction, stream());
  }
};

}  // namespace

std::shared_ptr<EnqueueGroup> make_device_solo_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
  return std::make_shared<DeviceSoloGroup>(std::move(host), std::move(device));
}

}  // namespace ours
