#include <cstdio>
#include <numeric>

#include "device/device_library.h"
#include "support/device_contract.h"
#include "support/groups.h"
#include "support/testing.h"

// NCCL itself, with one rank, since two need a GPU each.

namespace ours {
namespace {

using testing::call_of;
using testing::OnDevice;

constexpr size_t kCount = 100;
constexpr size_t kBytes = kCount * sizeof(float);

/// A group of one rank on a device. If NCCL cannot be used, there is no group, and the reason is shown.
class OneRank {
 public:
  OneRank() : on(4096, 2) {
    DeviceLibrary& library = *ours_device_library(kDeviceInterface);
    const std::string obstacle = library.why_no_vendor_group();
    if (!obstacle.empty()) {
      std::printf("skipped: %s\n", obstacle.c_str());
      return;
    }
    const auto host = testing::node_kind("", Setting::Auto).make(1, 0)[0]();
    group = library.make_vendor_group(host, on.device, Deadline::after(std::chrono::seconds(60)));
    std::vector<float> values(kCount);
    std::iota(values.begin(), values.end(), 1.0F);
    on.put(on.at(0), values.data(), kBytes);
  }

  /// Whether `body`, which gets the number of its call, makes the output equal to the input.
  template <class Body>
  bool copies(const Body& body) {
    const std::vector<char> poison(kBytes, 'x');
    on.put(on.at(1), poison.data(), kBytes);
    body(++calls_);
    return on.get(on.at(1), kBytes) == on.get(on.at(0), kBytes);
  }

  OnDevice on;
  std::shared_ptr<Group> group;

 private:
  uint64_t calls_ = 0;
};

TEST(cuda_nccl_does_all_that_a_group_is_asked_for) {
  OneRank one;
  if (!one.group) return;
  Group& group = *one.group;
  const ConstSpan in{one.on.at(0), kBytes};
  const Span out{one.on.at(1), kBytes};
  const Reduction sum{ReduceKind::Sum, 1, 1.0};
  const DType type = DType::Float32;
  CHECK(one.copies(
      [&](uint64_t n) { group.all_reduce(call_of(Op::AllReduce, type, n), in.data, out.data, kCount, sum); }));
  CHECK(one.copies([&](uint64_t n) { group.reduce(call_of(Op::Reduce, type, n), in.data, out.data, kCount, sum, 0); }));
  CHECK(one.copies([&](uint64_t n) {
    group.reduce_scatter(call_of(Op::ReduceScatter, type, n), {in.data}, {kCount}, out.data, sum);
  }));
  CHECK(one.copies([&](uint64_t n) { group.all_gather(call_of(Op::AllGather, type, n), in, {out}); }));
  CHECK(one.copies([&](uint64_t n) { group.gather(call_of(Op::Gather, type, n), in, {out}, 0); }));
  CHECK(one.copies([&](uint64_t n) { group.scatter(call_of(Op::Scatter, type, n), {in}, out, 0); }));
  CHECK(one.copies([&](uint64_t n) { group.all_to_all(call_of(Op::AllToAll, type, n), {in}, {out}); }));
  const auto before = one.on.get(in.data, kBytes);
  group.broadcast(call_of(Op::Broadcast, type, 100), {one.on.at(0), kBytes}, 0);
  CHECK(one.on.get(in.data, kBytes) == before);
  group.leave();
}

TEST(cuda_nccl_is_aborted_in_time) {
  OneRank one;
  if (!one.group) return;
  const auto began = Clock::now();
  one.group->abort("enough");
  const Call call = call_of(Op::Broadcast, DType::Float32, 1);
  CHECK_CONTAINS(CHECK_THROWS(AbortedError, one.group->broadcast(call, {one.on.at(0), kBytes}, 0)), "enough");
  one.group.reset();
  CHECK(Clock::now() - began < std::chrono::seconds(10));
  one.on.finish();  // the device works
}

}  // namespace
}  // namespace ours
