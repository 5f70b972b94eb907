#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/device/device_group_base.h"
#include "collectives/device/staging_pipeline.h"
#include "collectives/pieces.h"

namespace ours {

/// Collectives over device memory that go through the memory of the host: chunks come down into pinned memory, the
/// host group works on them there, and the results go up, all at the same time (StagingPipeline). Works wherever the
/// host group does.
///
/// Data that fits into one chunk takes one call of the host group, which compares it with the peers' calls. Longer
/// data, and every operation whose sizes no single rank knows, begins with a comparison of the whole.
///
/// The operations: staging_reduce.cpp, staging_move.cpp.
class StagingGroup final : public DeviceGroupBase {
 public:
  static constexpr size_t kChunkBytes = size_t{4} << 20;

  /// A step takes `chunk_bytes` of a rank's input and gives it at most as many of output. All ranks must pass the
  /// same.
  StagingGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, size_t chunk_bytes = kChunkBytes);
  ~StagingGroup() override;

  std::vector<StreamHandle> streams() const override { return pipeline_.streams(); }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void let_go() noexcept override;

 private:
  void broadcast_chunks(const Running& run, const ExchangePlan& plan);
  /// For operations whose sizes only some ranks know: opens the call, and returns the most bytes from one rank to
  /// another.
  size_t agree_on_sizes(const Running& run, const ExchangePlan& plan);
  void exchange_windows(const Running& run, const ExchangePlan& plan, size_t most);
  void copy(void* to, const void* from, size_t bytes, StreamHandle stream);

  /// Each rank has the same share of a chunk.
  size_t window_bytes() const;
  /// Room for a chunk, and for a window for each rank that sends to this one and for each that receives from it.
  size_t slot_bytes() const;
  StagingPipeline::Job job_of(const Running& run);

  const size_t chunk_bytes_;
  StagingPipeline pipeline_;
};

}  // namespace ours
