#include <algorithm>
#include <deque>

#include "collectives/node/node_group_impl.h"
#include "common/partition.h"

// all_reduce of data that lies in the heap on all ranks, in one piece or in several.
//
// Nothing is copied: whoever reduces a share of the elements reads it from all ranks' buffers and writes the result
// back to all of them. Every byte is read once and written once, and there are two synchronisations: all buffers are
// ready; all results are written. Since any rank can reduce any share, shares go to whoever comes for one. Where ranks
// outnumber cores, those that run do the work of those that wait for a core (self-scheduling: Tang and Yew 1986).
//
// With the first synchronisation each rank publishes, in its stage, where its buffer's parts lie.

namespace ours {

namespace {

/// Of each rank's buffer: enough that taking one costs nothing, and little enough that none is waited for.
constexpr size_t kShareBytes = 128 * 1024;

/// What a rank has just read of all buffers is still in its cache when it writes.
constexpr size_t kPieceBytes = 32 * 1024;

}  // namespace

bool NodeGroup::publish_places(const Pieces& data, size_t element) {
  const std::shared_ptr<NodeHeap>& heap = session_->heap();
  const size_t parity = barrier_.next_parity();
  auto* const parts = reinterpret_cast<HeapPart*>(stage(rank(), parity));
  if (!heap || data.places() > session_->layout().chunk_bytes / sizeof(HeapPart)) return false;
  uint64_t count = 0;
  bool in_heap = true;
  data.visit(0, data.count(), [&](const std::byte* begin, size_t, size_t n) {
    const uint64_t offset = in_heap ? heap->offset_of(begin, n * element) : NodeHeap::kNowhere;
    in_heap = in_heap && offset != NodeHeap::kNowhere;
    if (in_heap) parts[count++] = {offset, n * element};
  });
  if (!in_heap) return false;
  session_->self().heap_parts[parity] = count;
  exposed_ = barrier_.next();
  // All have passed the last reduction's second synchronisation: nobody takes shares of it any more.
  if (rank() == 0) session_->header().shares_taken.store(0, std::memory_order_relaxed);
  return true;
}

// A rank that was stopped between its look for a failure and its write writes when it goes on, be that minutes later.
// By then the others have given up, and their tensors hold something else. So whoever gives up takes the pages of its
// tensors out of the shared memory, and the late rank writes to pages that nobody reads.
//
// It need not where nobody can have begun: whoever passed the opening synchronisation and then looked for a failure, as
// all do before they write. Where a rank is seen not to have arrived there after the failure could be seen by all, it
// arrives, if ever, after that, and so do those look that wait for it.
void NodeGroup::withdraw() noexcept {
  if (!exposed_ || (session_->failure().told() && !barrier_.all_arrived(*exposed_))) return;
  const size_t parity = *exposed_ & 1;
  const auto* const parts = reinterpret_cast<const HeapPart*>(stage(rank(), parity));
  const uint64_t count = session_->self().heap_parts[parity];
  for (uint64_t i = 0; i < count; ++i) session_->heap()->withdraw(parts[i].offset, parts[i].bytes);
}

int NodeGroup::ranks_in_heap() const {
  int ranks = 0;
  for (int r = 0; r < size(); ++r) ranks += session_->block(r).heap_parts[barrier_.parity()] != 0 ? 1 : 0;
  return ranks;
}

std::vector<Span> NodeGroup::places_of(int r) const {
  const auto* const parts = reinterpret_cast<const HeapPart*>(stage(r, barrier_.parity()));
  const uint64_t count = session_->block(r).heap_parts[barrier_.parity()];
  std::vector<Span> spans;
  spans.reserve(count);
  for (uint64_t i = 0; i < count; ++i) spans.push_back({session_->heap()->at(r, parts[i].offset), parts[i].bytes});
  return spans;
}

void NodeGroup::reduce_in_heap(const Call& call, const CallRecord& record, const Pieces& own,
                               const Reduction& reduction) {
  const size_t element = size_of(call.dtype);
  std::deque<Pieces> peers;
  std::vector<const Pieces*> buffers(static_cast<size_t>(size()), &own);
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) buffers[static_cast<size_t>(r)] = &peers.emplace_back(places_of(r), element);
  }
  Sources sources(size());
  write_.begin();
  // Of the elements from `at` on as many, up to `end`, as lie in one stretch on all ranks; returns their number.
  const auto reduce_some = [&](size_t at, size_t end) {
    size_t count = std::min(end - at, kPieceBytes / element);
    for (int r = 0; r < size(); ++r) {
      const Pieces::Stretch stretch = buffers[static_cast<size_t>(r)]->stretch(at);
      sources.data()[r] = stretch.data;
      count = std::min(count, stretch.count);
    }
    auto* const result = static_cast<std::byte*>(const_cast<void*>(sources.data()[rank()]));
    ours::reduce(result, sources.data(), size(), count, call.dtype, reduction);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) write_.copy(const_cast<void*>(sources.data()[r]), result, count * element);
    }
    return count;
  };

  const size_t per_share = kShareBytes / element;
  std::atomic<uint64_t>& taken = session_->header().shares_taken;
  while (true) {
    const Slice share = piece_of(own.count(), per_share, taken.fetch_add(1, std::memory_order_relaxed));
    if (share.empty()) break;
    for (size_t at = share.begin; at < share.end;) {
      // The buffers of peers that have given up are theirs again.
      session_->failure().check();
      at += reduce_some(at, share.end);
    }
  }
  sync(call, record);
}

}  // namespace ours
