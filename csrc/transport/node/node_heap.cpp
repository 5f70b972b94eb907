#include "transport/node/node_heap.h"

#include <utility>

#include "common/error.h"

namespace ours {

NodeHeap::NodeHeap(int rank, std::vector<HeapPlace*> places, std::shared_ptr<ProcessHeaps> heaps)
    : rank_(rank), places_(std::move(places)), heaps_(std::move(heaps)), peers_(places_.size()) {}

std::shared_ptr<void> NodeHeap::allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!own_) show(heaps_->make_own());
  std::byte* const data = own_->allocate(bytes);
  in_use_->fetch_add(bytes, std::memory_order_relaxed);
  return {data, [heap = own_, in_use = in_use_, bytes](void* memory) {
            heap->free(static_cast<std::byte*>(memory));
            in_use->fetch_sub(bytes, std::memory_order_relaxed);
          }};
}

uint64_t NodeHeap::offset_of(const void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (own_) return own_->offset_of(data, bytes);
  // Another group may have allocated it.
  std::shared_ptr<OwnHeap> heap = heaps_->own();
  const uint64_t offset = heap ? heap->offset_of(data, bytes) : kNowhere;
  if (offset == kNowhere) return kNowhere;
  try {
    show(std::move(heap));
  } catch (const SystemError&) {
    return kNowhere;
  }
  return offset;
}

void NodeHeap::show(std::shared_ptr<OwnHeap> heap) {
  HeapFile::check_room(places_.size());
  *places_[static_cast<size_t>(rank_)] = heap->place();
  own_ = std::move(heap);
}

void NodeHeap::withdraw(uint64_t offset, size_t bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (own_) own_->withdraw(offset, bytes);
}

uint64_t NodeHeap::withdrawals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return own_ ? own_->withdrawals() : 0;
}

std::byte* NodeHeap::at(int rank, uint64_t offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (rank == rank_) return own_->at(offset);
  std::shared_ptr<PeerHeap>& peer = peers_.at(static_cast<size_t>(rank));
  if (!peer) peer = heaps_->peer(*places_[static_cast<size_t>(rank)]);
  return peer->at(offset);
}

}  // namespace ours
