#include "collectives/device/device_solo.h"

#include <utility>

#include "collectives/call_checks.h"

namespace ours {

namespace {

class DeviceSoloGroup final : public EnqueueGroup {
 public:
  DeviceSoloGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
      : EnqueueGroup(std::move(host), std::move(device)) {}
  ~DeviceSoloGroup() override { end(); }

  void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) override {
    check_supported(reduction.kind, call.dtype);
    run(call, {}, [&] { reduce(call, in, out, count, reduction); });
  }

  void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) override {
    check_supported(reduction.kind, call.dtype);
    run(call, {}, [&] {
      for (const Span& piece : pieces) {
        reduce(call, piece.data, piece.data, piece.bytes / size_of(call.dtype), reduction);
      }
    });
  }

  void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
              int root) override {
    check_root(root, 1);
    all_reduce(call, in, out, count, reduction);
  }

  void reduce_scatter(const Call& call, const std::vector<const void*>& inputs, const std::vector<size_t>& counts,
                      void* out, const Reduction& reduction) override {
    check_reduce_scatter(inputs, counts, 1);
    all_reduce(call, inputs[0], out, counts[0], reduction);
  }

  void broadcast(const Call& call, Span, int root) override {
    check_root(root, 1);
    run(call, {}, [] {});
  }

  void all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) override {
    check_one_a_rank(call, outputs.size(), 1);
    copy(call, input, outputs[0]);
  }

  void gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) override {
    check_root(root, 1);
    all_gather(call, input, outputs);
  }

  void scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) override {
    check_root(root, 1);
    all_to_all(call, inputs, {output});
  }

  void all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) override {
    check_one_a_rank(call, inputs.size(), 1);
    all_gather(call, inputs[0], outputs);
  }

 private:
  void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) const {
    // Not a plain copy: PREMUL_SUM multiplies even a single input.
    if (count != 0) device().reduce({out}, {in}, count, call.dtype, reduction, stream());
  }

  void copy(const Call& call, ConstSpan from, Span to) {
    check_own(call, 0, from.bytes, to.bytes);
    run(call, {}, [&] {
      if (from.bytes != 0 && from.data != to.data) device().copy(to.data, from.data, from.bytes, stream());
    });
  }
};

}  // namespace

std::shared_ptr<EnqueueGroup> make_device_solo_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
  return std::make_shared<DeviceSoloGroup>(std::move(host), std::move(device));
}

}  // namespace ours
