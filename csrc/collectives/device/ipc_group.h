#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/device/device_group_base.h"
#include "collectives/device/device_opening.h"
#include "collectives/device/ipc_memory.h"
#include "collectives/pieces.h"
#include "common/partition.h"

namespace ours {

/// Collectives over device memory among ranks of one node whose devices reach each other: each rank shares memory of
/// its device, all map it, and copies and kernels go directly from one rank's memory to another's.
///
/// Several ranks may share a device. The lowest of them, its driver, launches the kernels for the device's whole
/// share of a reduction, because kernels of several processes would take turns, and each switch takes longer than a
/// small reduction. No kernel waits for anything: ranks wait for each other on the host, in the host group, and for
/// their own device by its events. After ranks have synchronised, all of them can read what was done on any of their
/// devices before.
///
/// A call opens with one such synchronisation, in which the ranks compare what they called and tell where their data
/// lies. Data outside the group's heap is first copied into the rank's stage. A stage has three slots, used in turn:
/// one for the incoming chunk, one for the chunk that is being reduced or read by others, and one for the chunk
/// before, whose results are copied out. Hence the next call may fill its first slot before it has opened, while
/// others still read the last slot of this call, and no call needs a closing synchronisation.
///
/// The operations: ipc_reduce.cpp, ipc_heap_reduce.cpp, ipc_move.cpp.
class IpcGroup final : public DeviceGroupBase {
 public:
  static constexpr size_t kSlots = 3;
  /// The size to ask share_device_memory() for.
  static constexpr size_t kStageBytes = kSlots * (size_t{20} << 20);

  /// All ranks have mapped `memory`.
  IpcGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, IpcMemory memory);
  ~IpcGroup() override;

  /// Returns device memory. All use of it on any stream must have ended before it is dropped.
  std::shared_ptr<void> allocate(size_t bytes) override;
  bool allocates() const override { return true; }
  std::vector<StreamHandle> streams() const override {
    return {copies_->handle(), kernels_->handle(), heap_->stream()};
  }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void guarded(const Running& run, const std::function<void()>& body) override;
  void let_go() noexcept override;

 private:
  /// The number of the segment that is the stage, on each rank.
  static constexpr uint64_t kStage = 0;
  /// A place in the heap is sent as three words: its segment, its offset there, its bytes.
  static constexpr size_t kPlaceWords = 3;

  // The frame of every operation (ipc_group.cpp).
  /// The first synchronisation: all ranks' `mine`, by rank. Peers' segments are known after it.
  std::vector<Words> open(const Running& run, const Words& mine);
  /// A later synchronisation.
  void sync(const Running& run) { host().barrier(run.call); }
  std::byte* slot(int rank, size_t number);
  void copy(void* to, const void* from, size_t bytes);
  void wait_copied(const Running& run);
  void wait_reduced(const Running& run);

  bool drives() const { return drivers_[device_of_[static_cast<size_t>(rank())]] == rank(); }
  /// The driver of the rank's device.
  int driver_of(int rank) const { return drivers_[device_of_[static_cast<size_t>(rank)]]; }
  /// The part of `count` elements that this rank's kernels reduce.
  Slice share_of(size_t count, size_t element) const;

  // Reductions (ipc_reduce.cpp, ipc_reduce_scatter.cpp, ipc_heap_reduce.cpp).
  /// What happens to chunk k of data that goes through the stages.
  struct Rounds {
    size_t chunks;
    std::function<void(size_t k)> copy_in;
    std::function<void(size_t k)> reduce;
    std::function<void(size_t k)> copy_out;
  };
  /// Has chunk 0 in this rank's stage.
  void begin_rounds(const Running& run, const Rounds& rounds);
  /// All that follows the synchronisation after it.
  void finish_rounds(const Running& run, const Rounds& rounds);
  /// The places of the data in the heap, one after the other; empty if it does not lie there.
  Words places_of(const Pieces& data, size_t element) const;
  void reduce_in_heap(const Running& run, const Reducing& job, const std::vector<Words>& opened, const Words& mine);

  const size_t slot_bytes_;  ///< the same on all ranks
  const std::shared_ptr<LetGoBoard> board_;
  const std::shared_ptr<DeviceHeap> heap_;
  std::unique_ptr<MappedMemory> memory_;  ///< null once it was let go
  std::vector<size_t> device_of_;         ///< by rank
  std::vector<int> drivers_;              ///< by device
  size_t next_slot_ = 0;                  ///< counts the chunks of all calls
  const std::unique_ptr<DeviceStream> copies_, kernels_;
  const std::unique_ptr<DeviceEvent> copied_, reduced_;
};

}  // namespace ours
