#include <algorithm>
#include <deque>

#include "collectives/device/ipc_group.h"

// all_reduce of data that lies in the heap on all ranks, in one piece or in several. Nothing is copied: each driver
// reads all ranks' data where it lies and writes the result back to all of it, for the share of its device. Every
// byte is read once and written once. There are two synchronisations: the one that opens the call says that all data
// is ready and where it lies; the last one says that all results are written. If some data lies in several places,
// one more tells where.

namespace ours {

namespace {

/// A kernel is launched for each stretch that is unbroken on all ranks, so data in many places is better copied
/// together.
constexpr size_t kMostPlaces = 64;

}  // namespace

Words IpcGroup::places_of(const Pieces& data, size_t element) const {
  Words places;
  bool in_heap = data.count() != 0;
  data.visit(0, data.count(), [&](const std::byte* begin, size_t, size_t n) {
    const auto place = in_heap ? heap_->place_of(begin, n * element) : std::nullopt;
    in_heap = place.has_value() && places.size() < kMostPlaces * kPlaceWords;
    if (in_heap) places.insert(places.end(), {place->segment, place->offset, n * element});
  });
  return in_heap ? places : Words{};
}

void IpcGroup::reduce_in_heap(const Running& run, const Reducing& job, const std::vector<Words>& opened,
                              const Words& mine) {
  const size_t element = size_of(run.call.dtype);
  std::vector<size_t> sizes;
  std::vector<Words> places;
  for (const Words& words : opened) {
    sizes.push_back(words[0] * kPlaceWords);
    places.emplace_back(words.begin() + 1, words.end());
  }
  const bool several = std::any_of(sizes.begin(), sizes.end(), [](size_t n) { return n > kPlaceWords; });
  if (several) places = gather_words(host(), run.call, mine, sizes);

  const Slice share = share_of(job.in.count(), element);
  std::deque<Pieces> data;
  for (size_t r = 0; !share.empty() && r < places.size(); ++r) {
    std::vector<Span> spans;
    for (size_t at = 0; at < places[r].size(); at += kPlaceWords) {
      spans.push_back({memory_->at(static_cast<int>(r), {places[r][at], places[r][at + 1]}), places[r][at + 2]});
    }
    data.emplace_back(spans, element);
  }
  for (size_t at = share.begin; at < share.end;) {
    // The elements that are unbroken on all ranks.
    size_t count = share.end - at;
    std::vector<void*> here;
    for (const Pieces& pieces : data) {
      const Pieces::Stretch stretch = pieces.stretch(at);
      here.push_back(stretch.data);
      count = std::min(count, stretch.count);
    }
    device().reduce(here, {here.begin(), here.end()}, count, run.call.dtype, job.reduction, kernels_->handle());
    at += count;
  }
  wait_reduced(run);
  sync(run);
}

}  // namespace ours
