#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "collectives/device/device_group_base.h"

namespace ours {

/// Collectives over device memory that go through the memory of the host. An operation copies all of this rank's
/// inputs into pinned memory, lets the host group do the same operation there, which also compares the ranks' calls,
/// and copies the results back. It works wherever the host group does.
///
/// It is meant for ranks that the network or the host's memory slows down more than these copies do.
class StagingGroup final : public DeviceGroupBase {
 public:
  static constexpr size_t kKeptBytes = size_t{1} << 30;

  /// The pinned memory grows to what the largest call needs. If that is more than `kept_bytes`, it shrinks again with
  /// the next call that needs less than half of it.
  StagingGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, size_t kept_bytes = kKeptBytes);
  ~StagingGroup() override { end(); }

  std::vector<StreamHandle> streams() const override { return {stream_->handle()}; }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void let_go() noexcept override { release(std::move(memory_)); }

 private:
  /// Returns pinned memory of at least `bytes`, which no earlier operation uses any more. Throws DeviceError.
  std::byte* room(size_t bytes);
  void copy(void* to, const void* from, size_t bytes);
  /// Returns when the copies are done.
  void finish_copies(const Running& run);

  const size_t kept_bytes_;
  const std::unique_ptr<DeviceStream> stream_;
  const std::unique_ptr<DeviceEvent> copied_;
  std::shared_ptr<void> memory_;
  size_t memory_bytes_ = 0;
};

}  // namespace ours
