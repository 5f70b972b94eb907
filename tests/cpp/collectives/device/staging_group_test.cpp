#include "collectives/device/staging_group.h"

#include <algorithm>

#include "support/device_ranks.h"

// Tests that are specific to groups that go through the host's memory; the contract of all groups is tested
// elsewhere.

namespace ours {
namespace {

using testing::call_of;
using testing::StandInDevice;
using testing::StandInOptions;

constexpr size_t kChunk = 4096;
constexpr size_t kPerChunk = kChunk / sizeof(float);

/// A host group that counts its calls.
class Counting final : public Group {
 public:
  explicit Counting(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  void monitored_barrier(const Call& call, bool all) override { group_->monitored_barrier(call, all); }
  std::shared_ptr<void> allocate(size_t bytes) override { return group_->allocate(bytes); }
  void abort(const std::string& reason) override { group_->abort(reason); }
  void fail(const std::exception_ptr& error) noexcept override { group_->fail(error); }
  void refuse(const Call& call, const std::string& why) noexcept override { group_->refuse(call, why); }
  void leave() noexcept override { group_->leave(); }
  std::string failure() const override { return group_->failure(); }

  size_t reductions = 0;
  size_t others = 0;
  std::function<void(size_t number)> before_reducing;

 protected:
  void check_usable(const Call&) override {}
  void do_barrier(const Running& run) override { group_->barrier(run.call); }
  void do_reduce(const Running& run, const Reducing& job) override {
    if (before_reducing) before_reducing(reductions);
    ++reductions;
    group_->reduce(run.call, job);
  }
  void do_reduce_scatter(const Running& run, const Scattering& job) override { group_->reduce_scatter(run.call, job); }
  void do_exchange(const Running& run, const ExchangePlan& plan) override {
    ++others;
    group_->exchange(run.call, plan);
  }

 private:
  std::shared_ptr<Group> group_;
};

/// Runs fn(host, device, group) on two ranks.
void run_counting(const std::function<void(Counting&, StandInDevice&, Group&)>& fn) {
  const auto hosts = testing::node_kind("", Setting::Auto).make(2, kChunk);
  testing::run_ranks(2, [&](int rank) {
    const auto host = std::make_shared<Counting>(hosts[static_cast<size_t>(rank)]());
    StandInOptions options;
    options.queues = 2;
    const auto device = StandInDevice::make(options);
    StagingGroup group(host, device, kChunk);
    fn(*host, *device, group);
  });
}

void reduce(Group& group, std::vector<float>& data, uint64_t seq) {
  group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), data.data(), data.data(), data.size(),
                   Reduction{ReduceKind::Sum, group.size(), 1.0});
}

TEST(staging_calls_the_host_group_once_where_one_chunk_is_enough) {
  run_counting([](Counting& host, StandInDevice&, Group& group) {
    uint64_t seq = 0;
    for (const size_t count : {size_t{0}, size_t{1}, kPerChunk, kPerChunk + 1, 3 * kPerChunk}) {
      host.reductions = host.others = 0;
      std::vector<float> data(count, 1.0f);
      reduce(group, data, seq++);
      CHECK(std::all_of(data.begin(), data.end(), [](float x) { return x == 2; }));
      const size_t chunks = std::max<size_t>((count + kPerChunk - 1) / kPerChunk, 1);
      CHECK_EQ(host.reductions, chunks);
      // A call of more than one chunk is agreed on first.
      CHECK_EQ(host.others, static_cast<size_t>(chunks > 1));
    }
    host.others = 0;
    std::vector<float> data(kPerChunk, static_cast<float>(group.rank()));
    group.broadcast(call_of(Op::Broadcast, DType::Float32, seq++), Span{data.data(), kChunk}, 1);
    CHECK_EQ(data[kPerChunk - 1], 1.0f);
    std::vector<float> all(kPerChunk);
    const size_t half = kChunk / 2;
    group.all_gather(call_of(Op::AllGather, DType::Float32, seq++), ConstSpan{data.data(), half},
                     {Span{all.data(), half}, Span{all.data() + kPerChunk / 2, half}});
    CHECK_EQ(all[kPerChunk - 1], 1.0f);
    CHECK_EQ(host.others, size_t{2});
  });
}

TEST(staging_has_the_next_chunk_on_its_way_while_the_host_works) {
  static constexpr size_t kChunks = 8;
  run_counting([](Counting& host, StandInDevice& device, Group& group) {
    std::vector<int> copies;
    host.before_reducing = [&](size_t) { copies.push_back(device.counts().copies); };
    std::vector<float> data(kChunks * kPerChunk, 1.0f);
    reduce(group, data, 0);
    // When the host gets chunk k, chunks 0 to k + 1 have been asked for, and chunks 0 to k - 1 sent up.
    for (size_t k = 0; k < kChunks; ++k) CHECK_EQ(copies[k], static_cast<int>(std::min(k + 2, kChunks) + k));
    CHECK_EQ(device.counts().copies, static_cast<int>(2 * kChunks));
  });
}

TEST(staging_keeps_a_chunk_until_it_is_up) {
  run_counting([](Counting& host, StandInDevice& device, Group& group) {
    std::vector<float> data(5 * kPerChunk);
    reduce(group, data, 0);
    // Streams share two queues in turn: the first is that of the copies up, the second that of the copies down.
    const auto up = device.make_stream();
    const auto down = device.make_stream();
    std::unique_ptr<testing::StoppedStream> stopped;
    host.reductions = 0;
    host.before_reducing = [&](size_t k) {
      if (k == 0) stopped = device.stop(up->handle());
      if (k != 2) return;
      // Chunk 3 would come down into the slot where chunk 0 waits to go up.
      const auto patience = Deadline::after(std::chrono::milliseconds(30));
      while (!patience.passed()) CHECK(!device.idle(down->handle()));
      stopped->go_on();
    };
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
    reduce(group, data, 1);
    for (size_t i = 0; i < data.size(); ++i) CHECK_EQ(data[i], static_cast<float>(2 * i));
  });
}

TEST(staging_compares_the_whole_call_before_the_first_chunk) {
  // One rank takes the short way, the other the long one.
  run_counting([](Counting& host, StandInDevice&, Group& group) {
    std::vector<float> data(group.rank() == 0 ? 10 : 3 * kPerChunk, 1.0f);
    CHECK_CONTAINS(CHECK_THROWS(MismatchError, reduce(group, data, 6)), "all_reduce number 6");
    CHECK_EQ(host.reductions, static_cast<size_t>(group.rank() == 0));
    CHECK(std::all_of(data.begin(), data.end(), [](float x) { return x == 1; }));
  });
}

}  // namespace
}  // namespace ours
