#include "reducer/in_place_reduction.h"

#include "reducer/bucket.h"

namespace ours {

void InPlaceReduction::open_memory(const Averaging& averaging) {
  if (was_seen_ || !averaging.abilities().heap || options_.lazy_bucket_allocation) return drop_memory();
  if (!memory_) {
    std::vector<size_t> sizes;
    for (size_t index = 0; index < parameters_.size(); ++index) {
      const size_t bytes = parameters_[index].nbytes();
      if (!options_.is_sparse(index) && bytes >= kLeastInPlaceBytes) sizes.push_back(bytes);
    }
    // The spare memory is no larger than the bucket that reducing in place saves.
    memory_ = GradientMemory::create(heap_of(*averaging.group(), parameters_.front().device()), sizes,
                                     static_cast<size_t>(options_.bucket_bytes_cap));
  }
  memory_->open();
}

void InPlaceReduction::close_memory() {
  if (memory_) memory_->close();
}

void InPlaceReduction::drop_memory() {
  if (memory_) memory_->release();
  memory_.reset();
}

void InPlaceReduction::decide(bool allowed, bool unseen) {
  active_ = allowed && unseen;
  was_seen_ = allowed && !unseen;
  if (!active_) drop_memory();
}

}  // namespace ours
