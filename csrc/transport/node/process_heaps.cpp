#include "transport/node/process_heaps.h"

#include "common/options.h"
#include "common/process_wide.h"

namespace ours {

namespace {

struct Here {
  std::shared_ptr<ProcessHeaps>* heaps = nullptr;

  void in_child() { heaps = nullptr; }  // the parent's; never freed, since that would take locks
};

}  // namespace

PeerHeap::PeerHeap(const HeapPlace& place) : file_(HeapFile::open(place)) { ForkGuard::add(*this); }

PeerHeap::~PeerHeap() { ForkGuard::remove(*this); }

void PeerHeap::keep_to_oneself() noexcept { file_.map_own(0, HeapFile::kBytes); }

std::shared_ptr<ProcessHeaps> ProcessHeaps::here() {
  auto& here = ProcessWide<Here>::get();
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.value.heaps == nullptr) {
    here.value.heaps = new std::shared_ptr<ProcessHeaps>(std::make_shared<ProcessHeaps>());
  }
  return *here.value.heaps;
}

std::shared_ptr<OwnHeap> ProcessHeaps::own() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return own_.lock();
}

std::shared_ptr<OwnHeap> ProcessHeaps::make_own() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<OwnHeap> heap = own_.lock();
  if (!heap || heap->lost() > most_lost_) own_ = heap = std::make_shared<OwnHeap>(options().huge_pages);
  return heap;
}

std::shared_ptr<PeerHeap> ProcessHeaps::peer(const HeapPlace& place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, is_new] = peers_.try_emplace({place.device, place.inode});
  std::shared_ptr<PeerHeap> heap = found->second.lock();
  if (heap) return heap;
  heap = std::make_shared<PeerHeap>(place);
  found->second = heap;
  if (!is_new) return heap;
  for (auto one = peers_.begin(); one != peers_.end();)
    one = one->second.expired() ? peers_.erase(one) : std::next(one);
  return heap;
}

}  // namespace ours
