#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/device/hosted_group.h"
#include "collectives/device/staging_pipeline.h"
#include "collectives/pieces.h"

namespace ours {

/// Collectives over device memory that go through the memory of the host: chunks come down into pinned memory, the host
/// group works on them there, and the results go up, all at a time (StagingPipeline). Works wherever the host group
/// does.
///
/// What fits into one chunk is one call of the host group, which compares it with its peers'. What does not begins with
/// a comparison of the whole, and so does all whose sizes no rank knows alone.
///
/// The operations: staging_reduce.cpp, staging_move.cpp.
class StagingGroup final : public HostedGroup {
 public:
  static constexpr size_t kChunkBytes = size_t{4} << 20;

  /// A step has so many bytes of what a rank gives, and at most as many of what it gets. All ranks must have the same.
  StagingGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, size_t chunk_bytes = kChunkBytes);
  ~StagingGroup() override;

  std::vector<StreamHandle> streams() const override { return pipeline_.streams(); }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  bool settle(std::chrono::milliseconds patience) noexcept override { return pipeline_.settle(patience); }
  void let_go(bool settled) noexcept override;

 private:
  void broadcast_chunks(const Running& run, const ExchangePlan& plan);
  /// Where sizes are known to some ranks only: opens the call, and returns the most bytes from one rank to another.
  size_t agree_on_sizes(const Running& run, const ExchangePlan& plan);
  void exchange_windows(const Running& run, const ExchangePlan& plan, size_t most);
  void copy(void* to, const void* from, size_t bytes, StreamHandle stream);

  /// Of a chunk, each rank has the same share.
  size_t window_bytes() const;
  /// Room for a chunk, and for a window for each rank that is given something and for each that gives something.
  size_t slot_bytes() const;
  StagingPipeline::Job job_of(const Running& run);

  const size_t chunk_bytes_;
  StagingPipeline pipeline_;
};

}  // namespace ours
