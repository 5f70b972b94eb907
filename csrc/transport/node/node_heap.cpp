#include "transport/node/node_heap.h"

#include <utility>

#include "common/error.h"
#include "common/pages.h"

namespace ours {

NodeHeap::NodeHeap(int rank, std::vector<ShownHeap*> shown, std::shared_ptr<ProcessHeaps> heaps)
    : rank_(rank), shown_(std::move(shown)), heaps_(std::move(heaps)), peers_(shown_.size()) {}

bool NodeHeap::allocates() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return make_own();
}

std::shared_ptr<void> NodeHeap::allocate(size_t bytes) {
  std::shared_ptr<OwnHeap> heap;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!make_own()) return nullptr;
    heap = own_;
  }
  std::byte* const data = heap->allocate(bytes);
  in_use_->fetch_add(whole_pages(bytes), std::memory_order_relaxed);
  return {data, [heap = std::move(heap), in_use = in_use_, bytes](void* memory) {
            heap->free(static_cast<std::byte*>(memory));
            in_use->fetch_sub(whole_pages(bytes), std::memory_order_relaxed);
          }};
}

bool NodeHeap::make_own() {
  if (own_) return true;
  if (refused_) return false;
  try {
    show(heaps_->make_own());
    return true;
  } catch (const SystemError&) {
    // A limit on file sizes or addresses, for example. Without a heap, tensors are copied through the segment.
    refused_ = true;
    return false;
  }
}

void NodeHeap::show(std::shared_ptr<OwnHeap> heap) {
  ShownHeap& shown = *shown_[static_cast<size_t>(rank_)];
  shown.place = heap->place();
  shown.shown.store(true, std::memory_order_release);
  own_ = std::move(heap);
}

uint64_t NodeHeap::offset_of(const void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<OwnHeap> heap = own_ ? own_ : heaps_->own();
  return heap ? heap->offset_of(data, bytes) : kNowhere;
}

uint64_t NodeHeap::claim(const void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!own_) {
    // Another group may have allocated it.
    std::shared_ptr<OwnHeap> heap = heaps_->own();
    if (!heap || heap->offset_of(data, bytes) == kNowhere) return kNowhere;
    show(std::move(heap));
  }
  if (!sees_all()) return kNowhere;
  const uint64_t offset = own_->claim(data, bytes, this);
  if (offset != kNowhere) claimed_.push_back(offset);
  return offset;
}

void NodeHeap::release() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const uint64_t offset : claimed_) own_->release(offset, this);
  claimed_.clear();
}

bool NodeHeap::sees_all() {
  for (; seen_ < shown_.size() && !blind_; ++seen_) {
    const ShownHeap& shown = *shown_[seen_];
    if (!shown.shown.load(std::memory_order_acquire)) return false;
    if (peers_[seen_] || seen_ == static_cast<size_t>(rank_)) continue;
    try {
      peers_[seen_] = heaps_->peer(shown.place);
    } catch (const Error&) {
      // No addresses or descriptors for it, or no permission.
      blind_ = true;
    }
  }
  return !blind_;
}

void NodeHeap::withdraw(uint64_t offset, size_t bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (own_) own_->withdraw(offset, bytes);
}

std::byte* NodeHeap::at(int rank, uint64_t offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (rank == rank_) return own_->at(offset);
  std::shared_ptr<PeerHeap>& peer = peers_.at(static_cast<size_t>(rank));
  if (!peer) peer = heaps_->peer(shown_[static_cast<size_t>(rank)]->place);
  return peer->at(offset);
}

}  // namespace ours
