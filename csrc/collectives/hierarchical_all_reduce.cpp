#include <algorithm>
#include <cstring>
#include <deque>

#include "collectives/hierarchical_group.h"
#include "collectives/node_group_impl.h"

// all_reduce and reduce over several nodes.
//
// Short messages: every rank writes its input into its stage, and after one synchronisation the node's leader reduces
// all stages, sends the sum to all other leaders and reduces theirs. A second synchronisation, and all ranks read the
// result. One message's time, and two synchronisations of the node.
//
// Long messages: a reduce-scatter in the node, of which a rank gets a slice; an all-reduce of the slice among the ranks
// of equal place on all nodes, the rail (rail_reduction.h); an all-gather in the node. Each host sends 2 (H - 1) / H of
// the array, which is the least, and all ranks share the work of sending. As a rail needs a rank on every node, there
// are as many as the smallest node has ranks; the others of a larger node give their inputs and get their results.
//
// All three steps are pipelined in chunks. Where the node's ranks have their data in the heap, a rail reads its slices
// there and writes the results back to all, without staging and without waiting for its node: see reduce_in_place().
// Else, chunks go through the stages in rounds, one synchronisation each: see reduce_staged().
//
// The order of an element's sum is that of ranks within a node, and then that of nodes, whatever the size of the
// message, so the bits are always the same. An average divides once, in the end; only float16 is multiplied by the
// inverse within the node, where its sum could be beyond its range. Sums of a node travel in the type of the call: a
// half type is rounded once more for each node. With OURS_WIRE_DTYPE, those of long float32 messages are, too.
//
// Nothing is written before all nodes are known to have made the same call: results depend on messages of all, which
// begin with what was called, and which no rank sends before it has compared its call with those of its node.

namespace ours {

namespace {

/// Results beyond this size leave the cache before anyone reads them.
constexpr size_t kStreamBytes = 4 * 1024 * 1024;
constexpr size_t kLeastStreamed = 4096;

void copy_result(void* to, const void* from, size_t bytes, bool stream) {
  if (stream && bytes >= kLeastStreamed) {
    copy_stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

void HierarchicalGroup::all_reduce(const Call& call, const void* in, void* out, size_t count,
                                   const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  const CallRecord record = record_of(call, count, reduction, -1);
  collective(call, record, [&](const Running& run) {
    reduce_to(run, {in == out ? to : from, &to, call.dtype, reduction, -1, call.dtype});
  });
}

void HierarchicalGroup::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const Pieces data(pieces, size_of(call.dtype));
  const CallRecord record = record_of(call, data.count(), reduction, -1);
  collective(call, record,
             [&](const Running& run) { reduce_to(run, {data, &data, call.dtype, reduction, -1, call.dtype}); });
}

void HierarchicalGroup::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
                               int root) {
  check_supported(reduction.kind, call.dtype);
  check_root(root);
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  const CallRecord record = record_of(call, count, reduction, root);
  collective(call, record, [&](const Running& run) {
    reduce_to(run, {from, rank() == root ? &to : nullptr, call.dtype, reduction, topology_.node_of(root), call.dtype});
  });
}

void HierarchicalGroup::reduce_to(const Running& run, const Reducing& job) {
  node_.reserve_stage();
  const size_t bytes = job.in.count() * size_of(job.dtype);
  const auto others = static_cast<size_t>(std::max(nodes() - 1, 1));
  // Sending the whole to every node costs more bytes with each of them.
  if (bytes <= mesh_->plan().small_bytes / others) {
    reduce_short(run, job);
  } else {
    reduce_long(run, job);
  }
}

void HierarchicalGroup::reduce_short(const Running& run, const Reducing& job) {
  const size_t element = size_of(job.dtype);
  const size_t count = job.in.count();
  const size_t bytes = count * element;
  // The leader's, of all nodes.
  std::byte* const sums = scratch((static_cast<size_t>(nodes()) + 1) * bytes);
  std::byte* const own = sums + static_cast<size_t>(node_index_) * bytes;
  const auto give = [&](const std::byte* result) {
    if (job.out == nullptr) return;
    job.out->visit(
        0, count, [&](std::byte* data, size_t at, size_t n) { std::memcpy(data, result + at * element, n * element); });
  };

  if (bytes > session_->layout().chunk_bytes) {
    // This node was told to use less memory than the others.
    open(run);
    const Pieces sum(own, count, element);
    const auto reduce = [&] {
      node_.reduce_to(run.call, run.record, job.in, is_leader() ? &sum : nullptr,
                      within_node(job.reduction, job.travels));
    };
    run.tcp.away(reduce);
    std::byte* const result = sums + static_cast<size_t>(nodes()) * bytes;
    if (is_leader()) exchange_sums(run, job, sums, result);
    run.tcp.away([&] { node_.broadcast(run.call, Span{result, bytes}, 0); });
    return give(result);
  }

  std::byte* const mine = node_.stage(local_, node_.barrier_.next_parity());
  job.in.visit(0, count, [&](std::byte* data, size_t at, size_t n) {
    node_.write_.copy(mine + at * element, data, n * element);
  });
  open(run);
  if (is_leader()) {
    Sources stages(session_->size());
    for (int r = 0; r < session_->size(); ++r) stages.data()[r] = node_.stage(r, node_.barrier_.parity());
    if (count != 0) {
      ours::reduce(own, stages.data(), session_->size(), count, job.dtype, within_node(job.reduction, job.travels));
    }
    exchange_sums(run, job, sums, node_.stage(local_, node_.barrier_.next_parity()));
  }
  sync(run);
  give(node_.stage(0, node_.barrier_.parity()));
}

void HierarchicalGroup::exchange_sums(const Running& run, const Reducing& job, std::byte* sums, std::byte* result) {
  const size_t count = job.in.count();
  const size_t bytes = count * size_of(job.dtype);
  const auto hosts = static_cast<size_t>(nodes());
  const auto here = static_cast<size_t>(node_index_);
  size_t sent = 0, received = 0;
  for (size_t i = 1; i < hosts; ++i) {
    run.tcp.send({leaders_[(here + i) % hosts], 0, bytes}, sums + here * bytes, &sent);
  }
  for (size_t i = 1; i < hosts; ++i) {
    const size_t from = (here + hosts - i) % hosts;
    run.tcp.receive({leaders_[from], 0, bytes}, sums + from * bytes, &received);
  }
  const size_t all = (hosts - 1) * run.tcp.parts(bytes);
  wait(run, [&] { return sent == all && received == all; });
  Sources all_sums(nodes());
  for (size_t node = 0; node < hosts; ++node) all_sums.data()[node] = sums + node * bytes;
  if (count != 0)
    ours::reduce(result, all_sums.data(), nodes(), count, job.dtype, between_nodes(job.reduction, job.travels));
}

RailReduction::Job HierarchicalGroup::rail_job(const Reducing& job, const RailSlices& slices) const {
  RailReduction::Job rail{
      {}, node_index_, local_, job.reader, job.dtype, job.travels, between_nodes(job.reduction, job.travels), slices};
  for (int node = 0; node < nodes(); ++node) {
    rail.peers.push_back(topology_.ranks_of(node)[static_cast<size_t>(local_)]);
  }
  return rail;
}

DType HierarchicalGroup::travelling_type(const Reducing& job) const {
  const ReduceKind kind = job.reduction.kind;
  const bool adds = kind == ReduceKind::Sum || kind == ReduceKind::Avg || kind == ReduceKind::PremulSum;
  const WireType wire = mesh_->plan().wire;
  if (job.dtype != DType::Float32 || !adds || wire == WireType::Float32) return job.dtype;
  return wire == WireType::BFloat16 ? DType::BFloat16 : DType::Float16;
}

/// The way of a long message through the node's stages, in which a rail's slice of a chunk has a window of its own.
/// Where windows are smaller than slices, a chunk takes several rounds.
class HierarchicalGroup::Stages {
 public:
  Stages(HierarchicalGroup& group, const Reducing& job, const RailSlices& slices)
      : node_(group.node_), local_(group.local_), job_(job), slices_(slices), element_(size_of(job.dtype)) {
    const NodeLayout& layout = group.session_->layout();
    const size_t window = std::min(layout.chunk_bytes / static_cast<size_t>(slices.rails), layout.result_bytes());
    window_ = std::max<size_t>(window / kCacheLine * kCacheLine / element_, 1);
    rounds_ = std::max<size_t>(piece_count(slices.longest(), window_), 1);
    stream_ = job.in.count() * element_ >= kStreamBytes;
  }

  const RailSlices& slices() const { return slices_; }
  bool has_rail() const { return local_ < slices_.rails; }
  /// Of a chunk.
  size_t rounds() const { return rounds_; }
  size_t all_rounds() const { return slices_.chunks() * rounds_; }

  /// Writes what the others reduce in a round into this rank's stage.
  void copy_in(size_t round) {
    std::byte* const stage = node_.stage(local_, node_.barrier_.next_parity());
    for (int rail = 0; rail < slices_.rails; ++rail) {
      if (rail == local_) continue;
      const Slice part = portion(round, rail);
      std::byte* const to = stage + static_cast<size_t>(rail) * window_ * element_;
      job_.in.visit(part.begin, part.end, [&](std::byte* data, size_t at, size_t n) {
        node_.write_.copy(to + at * element_, data, n * element_);
      });
    }
  }

  /// Reduces this rank's portion, from the stages, to `slot`, which is that of its chunk's slice.
  void reduce(size_t round, std::byte* slot) {
    const Slice part = portion(round, local_);
    std::byte* const to = slot + offset_of(round, local_);
    const int ranks = node_.size();
    Sources sources(ranks);
    const size_t window = static_cast<size_t>(local_) * window_;
    job_.in.visit(part.begin, part.end, [&](std::byte* data, size_t at, size_t n) {
      for (int r = 0; r < ranks; ++r) {
        sources.data()[r] = node_.stage(r, node_.barrier_.parity()) + (window + at) * element_;
      }
      sources.data()[local_] = data;
      ours::reduce(to + at * element_, sources.data(), ranks, n, job_.dtype, within_node(job_.reduction, job_.travels));
    });
  }

  /// Shows the others this rank's results of a round.
  void publish(size_t round, const std::byte* slot) {
    node_.write_.copy(node_.result(local_, node_.barrier_.next_parity()), slot + offset_of(round, local_),
                      portion(round, local_).size() * element_);
  }

  void copy_out(size_t round) {
    for (int rail = 0; rail < slices_.rails && job_.out != nullptr; ++rail) {
      const Slice part = portion(round, rail);
      const std::byte* const from = node_.result(rail, node_.barrier_.parity());
      job_.out->visit(part.begin, part.end, [&](std::byte* data, size_t at, size_t n) {
        copy_result(data, from + at * element_, n * element_, stream_);
      });
    }
  }

 private:
  Slice portion(size_t round, int rail) const {
    const Slice slice = slices_.of(round / rounds_, rail);
    const Slice part = piece_of(slice.size(), window_, round % rounds_);
    return {slice.begin + part.begin, slice.begin + part.end};
  }
  size_t offset_of(size_t round, int rail) const {
    return (portion(round, rail).begin - slices_.of(round / rounds_, rail).begin) * element_;
  }

  NodeGroup& node_;
  const int local_;
  const Reducing& job_;
  const RailSlices slices_;
  const size_t element_;
  size_t window_;  ///< elements
  size_t rounds_;
  bool stream_;
};

void HierarchicalGroup::reduce_long(const Running& run, const Reducing& asked) {
  Reducing job = asked;
  job.travels = travelling_type(job);
  const size_t element = size_of(job.dtype);
  const RailSlices slices{job.in.count(), 2 * mesh_->plan().chunk_bytes / element, rails_, kCacheLine / element};
  node_.write_.begin();
  const auto saw = [&](std::byte* data, size_t, size_t n) { node_.saw_buffer(data, n * element); };
  job.in.visit(0, job.in.count(), saw);
  if (job.out != nullptr && job.out != &job.in) job.out->visit(0, job.out->count(), saw);

  // A rank that is alone on its node shares its memory with all ranks of it, wherever it lies.
  const bool alone = session_->size() == 1;
  Stages stages(*this, job, slices);
  const bool in_place = job.out == &job.in && !alone && node_.publish_places(job.in, element);
  if (!in_place) {
    session_->self().heap_parts[node_.barrier_.next_parity()] = 0;
    if (!alone) stages.copy_in(0);
  }
  open(run);
  if (alone) return reduce_in_place(run, job, slices, false);
  const int in_heap = node_.ranks_in_heap();
  if (in_heap == session_->size()) return reduce_in_place(run, job, slices, true);
  if (in_heap > 0) {
    stages.copy_in(0);
    sync(run);
  }
  reduce_staged(run, job, stages);
}

// A round is what lies between two synchronisations. In round q, this rank reduces its portion of what round q - 1
// staged, hands a chunk's slice to its rail once it is complete, copies results out that were published in round q - 1,
// stages the next portion, and publishes its results of the round `delay` before: for these the rail has had the time
// of several chunks.
void HierarchicalGroup::reduce_staged(const Running& run, const Reducing& job, Stages& stages) {
  const size_t rounds = stages.rounds();
  const size_t all = stages.all_rounds();
  const size_t chunks = stages.slices().chunks();
  const size_t delay = std::min(RailReduction::window() - 1, chunks - 1) * rounds + rounds - 1;
  std::optional<RailReduction> rail;
  if (stages.has_rail()) {
    rail.emplace(run.tcp, rail_job(job, stages.slices()));
    rail->use(scratch(rail->memory_bytes()));
  }
  for (size_t round = 0;; ++round) {
    if (round > 0) sync(run);
    if (rail && round < all) {
      const size_t chunk = round / rounds;
      stages.reduce(round, rail->slot(chunk));
      if (round % rounds == rounds - 1) {
        wait(run, [&] { return rail->may_begin(); });
        rail->begin();
        push(run);
      }
    }
    if (round > delay) stages.copy_out(round - delay - 1);
    if (round == all + delay) return;
    if (round + 1 < all) stages.copy_in(round + 1);
    if (rail && round >= delay) {
      const size_t ready = round - delay;
      wait(run, [&] {
        rail->drain();
        return rail->done(ready / rounds);
      });
      stages.publish(ready, rail->slot(ready / rounds));
    }
  }
}

// Each rail goes its own way from here: nobody else reads its slices of the node's buffers, or writes to them.
void HierarchicalGroup::reduce_in_place(const Running& run, const Reducing& job, const RailSlices& slices,
                                        bool in_heap) {
  const size_t element = size_of(job.dtype);
  const int ranks = session_->size();
  if (local_ < slices.rails) {
    std::deque<Pieces> peers;
    std::vector<const Pieces*> buffers(static_cast<size_t>(ranks), &job.in);
    for (int r = 0; in_heap && r < ranks; ++r) {
      if (r != local_) buffers[static_cast<size_t>(r)] = &peers.emplace_back(node_.places_of(r), element);
    }
    RailReduction rail(run.tcp, rail_job(job, slices));
    rail.use(scratch(rail.memory_bytes()));

    Sources places(ranks);
    // Of the elements from `at` on as many, up to `end`, as lie in one stretch on all ranks.
    const auto find = [&](size_t at, size_t end) {
      size_t count = end - at;
      for (int r = 0; r < ranks; ++r) {
        const Pieces::Stretch stretch = buffers[static_cast<size_t>(r)]->stretch(at);
        places.data()[r] = stretch.data;
        count = std::min(count, stretch.count);
      }
      return count;
    };
    const auto reduce_slice = [&](size_t chunk) {
      const Slice slice = slices.of(chunk, local_);
      for (size_t at = slice.begin; at < slice.end;) {
        const size_t count = find(at, slice.end);
        ours::reduce(rail.slot(chunk) + (at - slice.begin) * element, places.data(), ranks, count, job.dtype,
                     within_node(job.reduction, job.travels));
        at += count;
      }
    };
    const auto write_slice = [&](size_t chunk) {
      const Slice slice = slices.of(chunk, local_);
      if (job.out != nullptr && job.out != &job.in) {
        job.out->visit(slice.begin, slice.end, [&](std::byte* data, size_t at, size_t n) {
          std::memcpy(data, rail.slot(chunk) + at * element, n * element);
        });
      }
      for (size_t at = slice.begin; at < slice.end && job.out == &job.in;) {
        const size_t count = find(at, slice.end);
        const std::byte* const from = rail.slot(chunk) + (at - slice.begin) * element;
        for (int r = 0; r < ranks; ++r) node_.write_.copy(const_cast<void*>(places.data()[r]), from, count * element);
        at += count;
      }
    };

    size_t begun = 0, written = 0;
    const size_t chunks = slices.chunks();
    const auto can_write = [&] { return written < begun && rail.done(written); };
    const auto can_begin = [&] {
      return begun < chunks && begun < written + RailReduction::window() && rail.may_begin();
    };
    while (written < chunks) {
      wait(run, [&] {
        rail.drain();
        return can_write() || can_begin();
      });
      // The buffers of peers that have given up are theirs again.
      session_->failure().check();
      if (can_write()) {
        write_slice(written++);
      } else {
        reduce_slice(begun++);
        rail.begin();
      }
    }
  }
  sync(run);
}

}  // namespace ours
