#include "transport/topology.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "common/error.h"
#include "common/siphash.h"

namespace ours {

namespace {

constexpr const char* kTag = "ours-topology1";

/// Names the process namespace of this process; "unknown" without /proc.
std::string process_namespace() {
  char name[64];
  const ssize_t length = ::readlink("/proc/self/ns/pid", name, sizeof(name));
  return length > 0 ? std::string(name, static_cast<size_t>(length)) : "unknown";
}

}  // namespace

Topology Topology::of(const std::vector<int>& leader_of_rank) {
  Topology topology;
  topology.leaders_ = leader_of_rank;
  const int size = topology.size();
  std::map<int, int> node_of_leader;
  for (int rank = 0; rank < size; ++rank) {
    const int leader = topology.leader_of(rank);
    if (leader < 0 || leader >= size || topology.leader_of(leader) != leader) {
      throw Error("rank " + std::to_string(rank) + " shares memory with rank " + std::to_string(leader) +
                  ", which does not lead its node. Do all ranks use one version of this package?");
    }
    const auto [found, is_new] = node_of_leader.try_emplace(leader, topology.nodes());
    if (is_new) topology.members_.emplace_back();
    topology.nodes_.push_back(found->second);
    topology.members_[static_cast<size_t>(found->second)].push_back(rank);
  }
  return topology;
}

Topology Topology::parse(const std::string& text, int size) {
  std::istringstream in(text);
  std::string tag;
  in >> tag;
  std::vector<int> leaders;
  for (int leader = 0; in >> leader;) leaders.push_back(leader);
  if (tag != kTag || !in.eof() || leaders.size() != static_cast<size_t>(size)) {
    throw Error("malformed list of nodes in the store: '" + text.substr(0, 80) +
                "'; do all ranks use one version of this package, and no other program the same store?");
  }
  return of(leaders);
}

std::string Topology::text() const {
  std::string text = kTag;
  for (const int leader : leaders_) text += ' ' + std::to_string(leader);
  return text;
}

std::vector<int> Topology::counterparts(int rank, int most) const {
  const int here = node_of(rank);
  std::set<int> others;
  if (nodes() - 1 <= most) {
    for (int step = 1; step < nodes(); ++step) others.insert((here + step) % nodes());
  } else {
    for (int step = 1; step < nodes(); step *= 2) {
      others.insert((here + step) % nodes());
      others.insert((here + nodes() - step) % nodes());
    }
  }
  std::vector<int> found;
  for (const int node : others) {
    const std::vector<int>& ranks = ranks_of(node);
    found.push_back(ranks[static_cast<size_t>(local_rank_of(rank)) % ranks.size()]);
  }
  return found;
}

int Topology::local_rank_of(int rank) const {
  const std::vector<int>& members = ranks_of(node_of(rank));
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

std::string machine_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id.empty() ? "unknown" : id;
}

std::string node_identity(const std::string& node_id) {
  // OURS_NODE_ID may hold anything, and not every store accepts that as part of a key.
  const std::string text = machine_id() + '\n' + process_namespace() + '\n' + node_id;
  char word[17];
  std::snprintf(word, sizeof(word), "%016llx",
                static_cast<unsigned long long>(siphash(SipKey{}, text.data(), text.size())));
  return word;
}

}  // namespace ours
