#include <algorithm>
#include <cstring>
#include <deque>

#include "collectives/hierarchical/hierarchical_group.h"
#include "collectives/node/node_group_impl.h"
#include "collectives/partial_sums.h"

// Long messages that lie in the heap on all ranks of the node, or anywhere where the node has but one rank; see
// hierarchical_all_reduce.cpp. A rail reads its slices of all buffers, and writes their results to all of them. Nobody
// else reads or writes these, so it goes its own way until all are done.

namespace ours {

/// The buffers of the node's ranks.
class HierarchicalGroup::Buffers {
 public:
  Buffers(HierarchicalGroup& group, const NodeReducing& job, bool in_heap)
      : node_(group.node_),
        job_(job),
        element_(size_of(job.dtype)),
        all_(static_cast<size_t>(node_.size()), &job.in),
        places_(node_.size()) {
    for (int r = 0; in_heap && r < node_.size(); ++r) {
      if (r != node_.rank()) all_[static_cast<size_t>(r)] = &peers_.emplace_back(node_.places_of(r), element_);
    }
  }

  void reduce(const Slice& slice, std::byte* to) {
    for (size_t at = slice.begin; at < slice.end;) {
      const size_t count = find(at, slice.end);
      ours::reduce(to + (at - slice.begin) * element_, places_.data(), node_.size(), count, job_.dtype,
                   within_node(job_.reduction, job_.travels));
      at += count;
    }
  }

  void write(const Slice& slice, const std::byte* from) {
    if (job_.out != nullptr && job_.out != &job_.in) {
      job_.out->visit(slice.begin, slice.end, [&](std::byte* data, size_t at, size_t n) {
        std::memcpy(data, from + at * element_, n * element_);
      });
    }
    for (size_t at = slice.begin; at < slice.end && job_.out == &job_.in;) {
      const size_t count = find(at, slice.end);
      for (int r = 0; r < node_.size(); ++r) {
        node_.write_.copy(const_cast<void*>(places_.data()[r]), from + (at - slice.begin) * element_, count * element_);
      }
      at += count;
    }
  }

 private:
  /// Where the elements from `at` on lie; as many, up to `end`, as lie in one stretch on all ranks.
  size_t find(size_t at, size_t end) {
    size_t count = end - at;
    for (size_t r = 0; r < all_.size(); ++r) {
      const Pieces::Stretch stretch = all_[r]->stretch(at);
      places_.data()[r] = stretch.data;
      count = std::min(count, stretch.count);
    }
    return count;
  }

  NodeGroup& node_;
  const NodeReducing& job_;
  const size_t element_;
  std::deque<Pieces> peers_;
  std::vector<const Pieces*> all_;
  Sources places_;
};

void HierarchicalGroup::reduce_in_place(const Stride& run, const NodeReducing& job, const RailSlices& slices,
                                        bool in_heap, Rail* rail) {
  if (rail != nullptr) {
    Buffers buffers(*this, job, in_heap);
    size_t begun = 0, written = 0;
    const size_t chunks = slices.chunks();
    const auto can_write = [&] { return written < begun && rail->done(written); };
    const auto can_begin = [&] { return begun < chunks && begun < written + Rail::window() && rail->may_begin(); };
    while (written < chunks) {
      wait(run, [&] {
        rail->advance();
        return can_write() || can_begin();
      });
      // The buffers of peers that have given up are theirs again.
      session_->failure().check();
      if (can_write()) {
        buffers.write(slices.of(written, local_), rail->slot(written));
        ++written;
      } else {
        buffers.reduce(slices.of(begun, local_), rail->slot(begun));
        ++begun;
        rail->begin();
      }
    }
  }
  sync(run);
}

}  // namespace ours
