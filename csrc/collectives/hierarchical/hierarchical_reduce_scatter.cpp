#include <algorithm>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/partial_sums.h"
#include "common/partition.h"

// reduce_scatter over several nodes: for each rank of another node, one rank of this node reduces what the node has
// for it and sends the sum; each rank reduces the sums that it gets from all nodes, its own included. So each node
// sends one sum for each rank of the others, which is the minimum. A node's ranks take turns in sending.
//
// Elements are summed in the same order as in hierarchical_reduce.cpp, and nothing is written before the sums of all
// nodes have arrived.

namespace ours::hierarchical {

void reduce_scatter(HierarchicalRun& run, const Scattering& job) {
  const DType dtype = run.running.call.dtype;
  const std::vector<size_t>& counts = job.counts;
  run.open();
  const size_t element = size_of(dtype);
  const size_t mine = counts[static_cast<size_t>(run.map.rank())];
  const size_t batch = run.batch_bytes() / element;
  const auto hosts = static_cast<size_t>(run.map.nodes());
  const auto here = static_cast<size_t>(run.map.here());
  const size_t locals = run.map.members().size();

  // The sums of all nodes for this rank, followed by those that it sends.
  std::byte* const sums = run.tcp.keep(hosts * mine * element);
  Tally sent, received;
  const auto message = [&](int peer, size_t b, size_t count) {
    return TcpCall::Message{peer, static_cast<uint16_t>(b), count * element, 0, static_cast<uint32_t>(b)};
  };
  const auto batches = [&](size_t count) { return std::max<size_t>(piece_count(count, batch), 1); };
  const auto place_here = static_cast<size_t>(run.map.local());
  for (size_t i = 1; i < hosts; ++i) {
    const size_t node = (here + hosts - i) % hosts;
    const std::vector<int>& theirs = run.map.ranks_of(static_cast<int>(node));
    const int from = theirs[place_here % theirs.size()];
    for (size_t b = 0; b < batches(mine); ++b) {
      const Slice piece = piece_of(mine, batch, b);
      run.tcp.receive(message(from, b, piece.size()), sums + (node * mine + piece.begin) * element, received);
    }
  }

  // Reduces for one rank in turn of a list: rank `first` + i of the list falls to rank i of this node.
  const auto reduce_for = [&](const std::vector<int>& readers, size_t first, bool own) {
    size_t most = 0;
    const auto reader = [&](size_t k) { return first + k < readers.size() ? readers[first + k] : -1; };
    const auto count_of = [&](size_t k) { return reader(k) < 0 ? 0 : counts[static_cast<size_t>(reader(k))]; };
    for (size_t k = 0; k < locals; ++k) most = std::max(most, count_of(k));
    std::byte* to = sums + here * mine * element;
    if (!own) to = run.tcp.keep(count_of(place_here) * element);
    for (size_t b = 0; b < batches(most); ++b) {
      std::vector<const void*> from(locals);
      std::vector<size_t> some(locals);
      for (size_t k = 0; k < locals; ++k) {
        const Slice piece = piece_of(count_of(k), batch, b);
        some[k] = piece.size();
        if (reader(k) >= 0) {
          from[k] = static_cast<const std::byte*>(job.inputs[static_cast<size_t>(reader(k))]) + piece.begin * element;
        }
      }
      const Slice piece = piece_of(count_of(place_here), batch, b);
      run.in_node([&] {
        run.node.reduce_scatter(run.running.call, from, some, to + piece.begin * element,
                                within_node(job.reduction, dtype));
      });
      if (own || reader(place_here) < 0 || b >= batches(count_of(place_here))) continue;
      run.tcp.send(message(reader(place_here), b, piece.size()), to + piece.begin * element, sent);
      run.push();
    }
  };
  for (size_t i = 1; i < hosts; ++i) {
    const std::vector<int>& readers = run.map.ranks_of(static_cast<int>((here + i) % hosts));
    for (size_t first = 0; first < readers.size(); first += locals) reduce_for(readers, first, false);
  }
  reduce_for(run.map.members(), 0, true);
  run.wait([&] { return sent.complete() && received.complete(); }, false);
  std::vector<const void*> sources;
  sources.reserve(hosts);
  for (size_t node = 0; node < hosts; ++node) sources.push_back(sums + node * mine * element);
  if (mine != 0)
    ours::reduce(job.out, sources.data(), run.map.nodes(), mine, dtype, between_nodes(job.reduction, dtype));
}

}  // namespace ours::hierarchical
