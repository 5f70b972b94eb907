#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/device/device_engine.h"
#include "collectives/device/device_group_base.h"
#include "collectives/device/ipc_memory.h"
#include "common/partition.h"

namespace ours {

/// Collectives over device memory among ranks of one node whose devices reach each other: each rank has a stage on its
/// device, all map it, and copies and kernels go directly from one rank's memory to another's (IpcMemory).
///
/// Several ranks may share a device. The lowest of them, its driver, launches the kernels for the device's whole
/// share of a reduction, because kernels of several processes would take turns, and each switch takes longer than a
/// small reduction. No kernel waits for anything: ranks wait for each other on the host, in the host group, and for
/// their own device by its events. After ranks have synchronised, all of them can read what was done on any of their
/// devices before.
///
/// Data is copied into the stages, and results out of them. A stage has three slots, used in turn: one for the
/// incoming chunk, one for the chunk that is being reduced or read by others, and one for the chunk before, whose
/// results are copied out. Hence the next call may fill its first slot before it has opened, while others still read
/// the last slot of this call, and no call needs a closing synchronisation.
///
/// The operations: ipc_reduce.cpp, ipc_move.cpp.
class IpcGroup final : public DeviceGroupBase {
 public:
  static constexpr size_t kSlots = 3;
  /// The least that a slot has: enough for copies and kernels at full speed.
  static constexpr size_t kSlotBytes = size_t{20} << 20;

  /// The size of each rank's stage. Processes that share a device take turns, and a turn takes longer than copying a
  /// small slot. So slots are larger there, as far as all stages of the group take a small part of the device's memory.
  static size_t stage_bytes(const std::vector<DeviceFacts>& facts);

  /// All ranks have mapped `memory`.
  IpcGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, std::shared_ptr<IpcMemory> memory);
  ~IpcGroup() override { end(); }

  std::vector<StreamHandle> streams() const override { return {copies_->handle(), kernels_->handle()}; }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void let_go() noexcept override;

 private:
  // The frame of every operation (ipc_group.cpp).
  /// The slot of a rank for chunk k of this call.
  std::byte* slot(int rank, size_t k) const { return memory_->stage(rank) + (next_slot_ + k) % kSlots * slot_bytes_; }
  void copy(void* to, const void* from, size_t bytes);
  void wait_copied(const Running& run);
  void wait_reduced(const Running& run);
  void end_call(size_t chunks);

  bool drives() const { return driver_of(rank()) == rank(); }
  /// The driver of the rank's device.
  int driver_of(int rank) const { return driver_of_[static_cast<size_t>(rank)]; }

  // Reductions (ipc_reduce.cpp).
  /// What happens to chunk k.
  struct Rounds {
    size_t chunks;
    std::function<void(size_t k)> copy_in, reduce, copy_out;
  };
  void reduce_in_rounds(const Running& run, const Rounds& rounds);
  /// The part of `count` elements that this rank's kernels reduce.
  Slice share_of(size_t count, size_t element) const;
  /// Reduces these elements of all ranks' slots for chunk k into the slots of the ranks `to`.
  void reduce_slots(const Running& run, const Reduction& reduction, size_t k, const Slice& elements,
                    const std::vector<int>& to);

  std::shared_ptr<IpcMemory> memory_;  ///< null once it was let go
  const size_t slot_bytes_;
  std::vector<int> driver_of_;  ///< by rank
  std::vector<int> drivers_;
  size_t next_slot_ = 0;  ///< counts the chunks of all calls
  const std::unique_ptr<DeviceStream> copies_, kernels_;
  const std::unique_ptr<DeviceEvent> copied_, reduced_;
};

}  // namespace ours
