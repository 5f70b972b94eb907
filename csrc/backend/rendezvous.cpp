#include "backend/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "common/options.h"

namespace ours {

namespace {

constexpr const char* kErrorKey = "error";

std::string key_of(const std::string& step, int rank) { return step + '/' + std::to_string(rank); }

int number_in(const std::string& text) {
  try {
    return std::stoi(text);
  } catch (const std::exception&) {
    throw Error("malformed word '" + text.substr(0, 80) +
                "' in the store; do all ranks use one version of this package, and no other program the same store?");
  }
}

}  // namespace

Rendezvous::Rendezvous(const Meeting& meeting)
    : meeting_(meeting),
      deadline_(Deadline::after(meeting.timeout)),
      prefix_("ours/" + std::to_string(meeting.store->add("ours/attempts/" + std::to_string(meeting.rank), 1)) + "/"),
      keys_(meeting.store, prefix_) {}

std::string Rendezvous::describe_self() const {
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  return "rank " + std::to_string(meeting_.rank) + " (host " + host + ", pid " + std::to_string(::getpid()) + ")";
}

c10::intrusive_ptr<c10d::Store> Rendezvous::store(const std::string& name) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_ + name, meeting_.store);
}

std::shared_ptr<StoreKeys> Rendezvous::keys(const std::string& name) const {
  return std::make_shared<StoreKeys>(meeting_.store, prefix_ + name + '/');
}

Topology Rendezvous::find_topology() {
  std::unique_ptr<NodeProbe> probe;
  try {
    probe = std::make_unique<NodeProbe>();
  } catch (const Error& e) {
    fail(describe_self() + " cannot make shared memory for " + meeting_.group + ": " + e.what());
  }
  // The probe has to last until all have looked at it, which they have once there is a topology.
  const int leader = find_leader(*probe);
  const std::string text = round("leader", std::to_string(leader), [](const std::vector<std::string>& words) {
    std::vector<int> leaders;
    for (const std::string& word : words) leaders.push_back(number_in(word));
    return Topology::of(leaders).text();
  });
  return Topology::parse(text, meeting_.size);
}

int Rendezvous::find_leader(const NodeProbe& probe) {
  const std::string identity = node_identity(options().node_id);
  const std::string self = std::to_string(meeting_.rank) + ' ' + probe.address();
  // Who comes first to a place leads those who can read its memory; the others go on to the next place.
  for (int place = 0; place < meeting_.size; ++place) {
    const std::string leader = keys_.claim("node/" + identity + '/' + std::to_string(place), self);
    if (leader == self) return meeting_.rank;
    const size_t end = std::min(leader.find(' '), leader.size());
    if (NodeProbe::obstacle(leader.substr(end)).empty()) return number_in(leader);
  }
  throw Error("more ranks than the " + std::to_string(meeting_.size) + " of " + meeting_.group +
              " have come together. Does another job use the same store?");
}

std::shared_ptr<NodeSession> Rendezvous::open_node(const Topology& topology) {
  const int leader = topology.leader_of(meeting_.rank);
  const int local = topology.local_rank_of(meeting_.rank);
  const auto count = static_cast<int>(topology.ranks_of(topology.node_of(meeting_.rank)).size());
  const std::string key = key_of("memory", leader);
  std::shared_ptr<NodeSession> session;
  try {
    if (leader == meeting_.rank) {
      session = NodeSession::create(local, count, NodeConfig::from_options(count));
      keys_.set(key, session->address());
    } else {
      const auto late = [&] {
        return "rank " + std::to_string(leader) + " of " + meeting_.group + " did not publish its memory within " +
               std::to_string(meeting_.timeout.count()) + " ms (" + describe_self() +
               " waited for it). Did it fail, or has it no time?";
      };
      session = NodeSession::open(local, count, await({key}, late).front());
    }
  } catch (const TimeoutError&) {
    throw;
  } catch (const Error& e) {
    fail(describe_self() + " cannot share memory with the ranks of its node in " + meeting_.group + ": " + e.what());
  }
  session->wait_attached(deadline_, [this] { check_error(); });
  return session;
}

void Rendezvous::arrive(const std::string& step) {
  round(step, "here", [](const std::vector<std::string>&) { return std::string("all"); });
}

std::string Rendezvous::round(const std::string& step, const std::string& word,
                              const std::function<std::string(const std::vector<std::string>&)>& combine) {
  const auto late = [&] { return absent(step); };
  const std::string result = step + "s";
  keys_.set(key_of(step, meeting_.rank), word);
  if (meeting_.rank != 0) return await({result}, late).front();
  std::vector<std::string> words;
  for (int rank = 0; rank < meeting_.size; ++rank) words.push_back(key_of(step, rank));
  words = await(words, late);
  std::string text;
  try {
    text = combine(words);
  } catch (const Error& e) {
    fail(e.what());
  }
  keys_.set(result, text);
  return text;
}

std::vector<std::string> Rendezvous::await(const std::vector<std::string>& keys,
                                           const std::function<std::string()>& late) {
  constexpr std::chrono::milliseconds kSlice{5000};
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_.at() - Clock::now());
    try {
      return keys_.get_all(keys, Deadline::after(std::clamp(left, std::chrono::milliseconds(1), kSlice)));
    } catch (const TimeoutError&) {
      check_error();
      if (deadline_.passed()) throw TimeoutError(late());
    }
  }
}

std::string Rendezvous::absent(const std::string& step) {
  constexpr int kMostNamed = 16;
  std::string names;
  int count = 0;
  for (int rank = 0; rank < meeting_.size && count <= kMostNamed; ++rank) {
    if (keys_.has(key_of(step, rank))) continue;
    if (++count <= kMostNamed) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (count > kMostNamed) names += " and more";
  return "rank " + (names.empty() ? "0" : names) + " of " + meeting_.group + " did not publish " +
         (names.empty() ? "what all others did" : "where it is") + " within " +
         std::to_string(meeting_.timeout.count()) + " ms (" + describe_self() +
         " waited for it). Was it started, did it fail, and is the store not left over from another run?";
}

void Rendezvous::check_error() {
  if (keys_.has(kErrorKey)) throw Error(keys_.get(kErrorKey, deadline_));
}

std::string Rendezvous::report(const std::string& message) { return keys_.claim(kErrorKey, message); }

}  // namespace ours
