#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/device/device_group_base.h"
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
class StagingGroup final : public DeviceGroupBase {
 public:
  static constexpr size_t kChunkBytes = size_t{4} << 20;

  /// A step has so many bytes of what a rank gives, and at most as many of what it gets. All ranks must have the same.
  StagingGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, size_t chunk_bytes = kChunkBytes);
  ~StagingGroup() override;

  void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) override;
  void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) override;
  void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root) override;
  void reduce_scatter(const Call& call, const std::vector<const void*>& inputs, const std::vector<size_t>& counts,
                      void* out, const Reduction& reduction) override;
  void broadcast(const Call& call, Span buffer, int root) override;
  void all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) override;
  void gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) override;
  void scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) override;
  void all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) override;
  std::vector<StreamHandle> streams() const override { return pipeline_.streams(); }

 protected:
  void let_go() noexcept override;

 private:
  /// What this rank gives to, and gets from, each rank, one span a rank or none; of itself in the device's memory.
  struct Exchange {
    bool common = true;  ///< all that get something get the same bytes
    std::vector<ConstSpan> sends;
    std::vector<Span> receives;
  };
  /// The host group's part of a step of it, in the host's memory.
  using HostExchange = std::function<void(const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs)>;

  /// `out` is null where the result is not wanted; root -1: all want it.
  void reduce_to(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                 const Reduction& reduction, int root);
  /// Where sizes are known to some ranks only: opens the call, and returns the most bytes from one rank to another.
  size_t agree_on_sizes(const Call& call, const CallRecord& record, const Exchange& plan);
  void exchange(const Call& call, const CallRecord& record, const Exchange& plan, size_t most,
                const HostExchange& on_host);
  void copy(void* to, const void* from, size_t bytes, StreamHandle stream);

  /// Of a chunk, each rank has the same share.
  size_t window_bytes() const;
  /// Room for a chunk, and for a window for each rank that is given something and for each that gives something.
  size_t slot_bytes() const;
  StagingPipeline::Job job_of(const Call& call, const CallRecord& record);

  const size_t chunk_bytes_;
  StagingPipeline pipeline_;
};

}  // namespace ours
