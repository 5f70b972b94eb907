#include <algorithm>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/tcp/equal_sizes.h"
#include "common/partition.h"

// all_gather over several nodes: a rank sends its block to one rank of each other node, which shares it with its
// node, so each block travels to each node once. The ranks of a node take turns in receiving another node's blocks,
// so all share the work. They share what they received in batches, all ranks of the node at once, while more arrives.
//
// If any two ranks expect different sizes, so do two ranks of one node or the leaders of two nodes; these compare.

namespace ours::hierarchical {

namespace {

void agree_on_sizes(HierarchicalRun& run, const std::vector<uint64_t>& sizes) {
  const size_t bytes = sizes.size() * sizeof(uint64_t);
  std::vector<std::vector<uint64_t>> all(run.map.members().size(), std::vector<uint64_t>(sizes.size()));
  std::vector<Span> outputs;
  outputs.reserve(all.size());
  for (auto& table : all) outputs.push_back({table.data(), bytes});
  // This also compares the calls.
  run.in_node([&] { run.node.all_gather(run.running.call, {sizes.data(), bytes}, outputs); });
  for (int r = 1; r < run.rounds.size(); ++r) {
    const auto& theirs = all[static_cast<size_t>(r)];
    const auto differs = std::mismatch(all[0].begin(), all[0].end(), theirs.begin());
    if (differs.first == all[0].end()) continue;
    const auto from = static_cast<int>(differs.first - all[0].begin());
    run.tcp.mismatch(sizes_differ(run.rounds.session().describe(0), *differs.first, run.rounds.session().describe(r),
                                  *differs.second, run.tcp.describe(from), run.running.record));
  }
  if (run.map.is_leader()) compare_sizes(run.leaders(), sizes, run.running.record);
  run.sync();
}

}  // namespace

void all_gather(HierarchicalRun& run, const ExchangePlan& plan) {
  std::vector<uint64_t> sizes;
  std::vector<Span> outputs;
  for (const auto& output : plan.receives) {
    outputs.push_back(*output);
    sizes.push_back(output->bytes);
  }
  const ConstSpan input = *plan.sends[static_cast<size_t>(run.map.rank())];
  agree_on_sizes(run, sizes);

  const size_t chunk = run.plan.chunk_bytes;
  const size_t batch = run.batch_bytes() / chunk;
  Tally sent;
  std::vector<std::vector<Tally>> arrived(static_cast<size_t>(run.map.size()));  // by rank and batch
  for (int i = 1; i < run.map.nodes(); ++i) {
    const std::vector<int>& to = run.map.ranks_of((run.map.here() + i) % run.map.nodes());
    run.tcp.send({to[static_cast<size_t>(run.map.local()) % to.size()], 0, input.bytes}, input.data, sent);
  }
  for (int i = 1; i < run.map.nodes(); ++i) {
    const std::vector<int>& from = run.map.ranks_of((run.map.here() - i + run.map.nodes()) % run.map.nodes());
    for (auto k = static_cast<size_t>(run.map.local()); k < from.size(); k += run.map.members().size()) {
      const auto source = static_cast<size_t>(from[k]);
      const Span block = outputs[source];
      const size_t parts = run.tcp.parts(block.bytes);
      arrived[source].resize(piece_count(parts, batch));
      for (size_t part = 0; part < parts; ++part) {
        run.tcp.receive_part({from[k], 0, block.bytes}, part, static_cast<std::byte*>(block.data) + part * chunk,
                             arrived[source][part / batch]);
      }
    }
  }
  run.push();

  // First the node's own blocks, then those of another node, of which each rank of this one holds at most one at a
  // time.
  const auto share = [&](const std::vector<int>& from, size_t first, bool own) {
    std::vector<Span> blocks;
    for (size_t k = first; k < first + run.map.members().size(); ++k) {
      blocks.push_back(k < from.size() ? outputs[static_cast<size_t>(from[k])] : Span{});
    }
    const auto me = static_cast<size_t>(run.map.local());
    const bool waits = !own && first + me < from.size();
    size_t longest = 0;
    for (const Span& block : blocks) longest = std::max(longest, block.bytes);
    const size_t batches = std::max<size_t>(piece_count(longest, run.batch_bytes()), 1);
    for (size_t b = 0; b < batches; ++b) {
      if (waits) {
        const auto& here = arrived[static_cast<size_t>(from[first + me])];
        run.wait([&] { return b >= here.size() || here[b].complete(); });
      }
      if (run.rounds.size() == 1) continue;
      std::vector<Span> some;
      for (const Span& block : blocks) {
        const Slice piece = piece_of(block.bytes, run.batch_bytes(), b);
        some.push_back({static_cast<std::byte*>(block.data) + piece.begin, piece.size()});
      }
      const ConstSpan mine{some[me].data, some[me].bytes};
      run.in_node([&] { run.node.all_gather(run.running.call, mine, some); });
    }
  };
  plan.copy_own(static_cast<size_t>(run.map.rank()));
  share(run.map.members(), 0, true);
  for (int i = 1; i < run.map.nodes(); ++i) {
    const std::vector<int>& from = run.map.ranks_of((run.map.here() - i + run.map.nodes()) % run.map.nodes());
    for (size_t first = 0; first < from.size(); first += run.map.members().size()) share(from, first, false);
  }
  run.wait([&] { return sent.complete(); }, false);
}

}  // namespace ours::hierarchical
