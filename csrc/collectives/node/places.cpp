#include "collectives/node/places.h"

#include <algorithm>

#include "common/process_memory.h"

namespace ours {

bool Places::publish(const Pieces& data, size_t element) {
  NodeHeap& heap = session_.heap();
  const size_t parity = barrier_.next_parity();
  BufferPart* const own = parts(session_.rank(), parity);
  if (!have_room_for(data)) return false;
  uint64_t count = 0;
  bool in_heap = true;
  data.visit(0, data.count(), [&](const std::byte* begin, size_t, size_t n) {
    const uint64_t offset = in_heap ? heap.claim(begin, n * element) : NodeHeap::kNowhere;
    in_heap = in_heap && offset != NodeHeap::kNowhere;
    if (in_heap) own[count++] = {offset, n * element};
  });
  if (!in_heap) {
    heap.release();
    return false;
  }
  claims_ = true;
  session_.self().parts[parity] = count;
  published_ = barrier_.next();
  // All ranks have passed the last reduction's second synchronisation, so none takes shares of it any more.
  if (session_.rank() == 0) session_.header().shares_taken.store(0, std::memory_order_relaxed);
  return true;
}

// A rank that was stopped between its check for a failure and its write will write when it goes on, perhaps minutes
// later. By then the others have given up, and their tensors hold something else. So a rank that gives up takes the
// pages of its tensors out of the shared memory, and the late rank writes to pages that nobody reads.
//
// This is not needed if no rank can have begun to write: a rank that has passed the opening synchronisation checks
// for a failure before it writes. If one rank has not yet arrived there when all can see the failure, no rank passes
// the synchronisation before that, and so every rank finds the failure before it writes.
void Places::withdraw() noexcept {
  if (!published_ || (session_.failure().told() && !barrier_.all_arrived(*published_))) return;
  const size_t parity = *published_ & 1;
  const BufferPart* const own = parts(session_.rank(), parity);
  const uint64_t count = session_.self().parts[parity];
  for (uint64_t i = 0; i < count; ++i) session_.heap().withdraw(own[i].at, own[i].bytes);
}

void Places::end() noexcept {
  if (claims_) session_.heap().release();
  claims_ = false;
}

template <class At>
std::vector<Span> Places::published_by(int r, At&& at) const {
  const BufferPart* const theirs = parts(r, barrier_.parity());
  const uint64_t count = session_.block(r).parts[barrier_.parity()];
  std::vector<Span> spans;
  spans.reserve(count);
  for (uint64_t i = 0; i < count; ++i) spans.push_back({at(theirs[i].at), theirs[i].bytes});
  return spans;
}

std::vector<Span> Places::of(int r) const {
  return published_by(r, [&](uint64_t offset) { return session_.heap().at(r, offset); });
}

bool Places::lend(const Pieces& data, size_t element) {
  if (!session_.reads_all(session_.rank()) || !have_room_for(data)) return false;
  const size_t parity = barrier_.next_parity();
  BufferPart* const own = parts(session_.rank(), parity);
  uint64_t count = 0;
  ReadableByOthers readable;
  data.visit(0, data.count(), [&](const std::byte* begin, size_t, size_t n) {
    own[count++] = {reinterpret_cast<uint64_t>(begin), n * element};
    readable.add(begin, n * element);
  });
  session_.self().parts[parity] = count;
  return readable.all();
}

std::vector<Span> Places::lent_by(int r) const {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): it is an address of that rank's process.
  return published_by(r, [](uint64_t address) { return reinterpret_cast<std::byte*>(address); });
}

HeapBuffers::HeapBuffers(const Places& places, int rank, int ranks, const Pieces& own, size_t element)
    : all_(static_cast<size_t>(ranks), &own), sources_(ranks) {
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) all_[static_cast<size_t>(r)] = &peers_.emplace_back(places.of(r), element);
  }
}

size_t HeapBuffers::find(size_t at, size_t end) {
  size_t count = end - at;
  for (size_t r = 0; r < all_.size(); ++r) {
    const Pieces::Stretch stretch = all_[r]->stretch(at);
    sources_.data()[r] = stretch.data;
    count = std::min(count, stretch.count);
  }
  return count;
}

}  // namespace ours
