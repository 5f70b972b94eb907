#include "backend/joining/rendezvous.h"

#include <algorithm>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "common/listed.h"
#include "common/options.h"
#include "common/own_name.h"

namespace ours {

namespace {

/// So long an error waits for the store, which may not answer.
constexpr std::chrono::seconds kErrorPatience{1};

std::string key_of(const std::string& step, int rank) { return step + '/' + std::to_string(rank); }

int number_in(const std::string& text) {
  try {
    return std::stoi(text);
  } catch (const std::exception&) {
    throw Error("malformed word '" + text.substr(0, 80) +
                "' in the store; do all ranks use one version of this package, and no other program the same store?");
  }
}

/// The end of "rank 2 (host node1, pid 4711)" that tells who it is.
std::string name_in(const std::string& text) { return text.substr(std::min(text.find('('), text.size())); }

std::string number_of_attempt(const Meeting& meeting, Deadline deadline) {
  const auto number = std::make_shared<int64_t>();
  ask_store(meeting.store, deadline, {},
            [number, key = "ours/attempts/" + std::to_string(meeting.rank)](c10d::Store& store, const auto&) {
              *number = store.add(key, 1);
            });
  return std::to_string(*number);
}

}  // namespace

Rendezvous::Rendezvous(const Meeting& meeting)
    : meeting_(meeting),
      deadline_(Deadline::after(meeting.timeout)),
      prefix_("ours/" + number_of_attempt(meeting, deadline_) + "/"),
      trouble_(std::make_shared<Trouble>(prefix_, describe_self(), meeting.group)),
      keys_(meeting.store, prefix_, terms()) {
  ask_store(meeting.store, deadline_, {}, [all = trouble_](c10d::Store& store, const auto&) { all->announce(store); });
}

StoreKeys::Terms Rendezvous::terms() const {
  // So that the looks of all together are about a thousand a second, which leave the store, and whoever shares its
  // cores, time for other work.
  const std::chrono::milliseconds pause(std::clamp(meeting_.size, 10, 250));
  return {deadline_, [all = trouble_](c10d::Store& store) { all->check(store); }, pause};
}

std::string Rendezvous::describe_self() const { return describe_own(meeting_.rank); }

StorePtr Rendezvous::store(const std::string& name) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_ + name, meeting_.store);
}

std::shared_ptr<StoreKeys> Rendezvous::keys(const std::string& name) const {
  return std::make_shared<StoreKeys>(meeting_.store, prefix_ + name + '/', terms());
}

Topology Rendezvous::find_topology() {
  std::unique_ptr<NodeProbe> probe;
  try {
    probe = std::make_unique<NodeProbe>();
  } catch (const MemoryRefused& e) {
    TORCH_WARN_ONCE(e.what(), ". ", describe_self(), " talks to all ranks over TCP, which is slower");
  } catch (const Error& e) {
    fail(describe_self() + " cannot make shared memory for " + meeting_.group + ": " + e.what());
  }
  // The probe has to last until all have looked at it, which they have once there is a topology.
  const int leader = probe ? find_leader(*probe) : meeting_.rank;
  const std::string word = std::to_string(leader) + ' ' + name_in(describe_self());
  std::istringstream result(round("leader", word, [](const std::vector<std::string>& words) {
    std::vector<int> leaders;
    std::string names;
    for (const std::string& one : words) {
      leaders.push_back(number_in(one));
      names += '\n' + name_in(one);
    }
    return Topology::of(leaders).text() + names;
  }));
  std::string text;
  std::getline(result, text);
  for (std::string name; std::getline(result, name);) names_.push_back(name);
  if (names_.size() != static_cast<size_t>(meeting_.size)) names_.clear();
  return Topology::parse(text, meeting_.size);
}

int Rendezvous::find_leader(const NodeProbe& probe) {
  const std::string identity = node_identity(options().node_id);
  const std::string self = std::to_string(meeting_.rank) + ' ' + probe.address();
  // Who comes first to a place leads those who can read its memory; the others go on to the next place.
  for (int place = 0; place < meeting_.size; ++place) {
    const std::string leader = keys_.claim("node/" + identity + '/' + std::to_string(place), self, deadline_);
    if (leader == self) return meeting_.rank;
    const size_t end = std::min(leader.find(' '), leader.size());
    if (NodeProbe::obstacle(leader.substr(end)).empty()) return number_in(leader);
  }
  throw Error("more ranks than the " + std::to_string(meeting_.size) + " of " + meeting_.group +
              " have come together. Does another job use the same store?");
}

std::shared_ptr<NodeSession> Rendezvous::open_node(const Topology& topology, const std::string& rules) {
  const int leader = topology.leader_of(meeting_.rank);
  const int local = topology.local_rank_of(meeting_.rank);
  const auto count = static_cast<int>(topology.ranks_of(topology.node_of(meeting_.rank)).size());
  const std::string key = key_of("memory", leader);
  std::shared_ptr<NodeSession> session;
  try {
    if (leader == meeting_.rank) {
      NodeConfig config = NodeConfig::from_options(count);
      config.rules = rules;
      session = NodeSession::create(local, count, config);
      keys_.set(key, session->address());
    } else {
      const auto late = [&] {
        return "rank " + std::to_string(leader) + " of " + meeting_.group +
               " did not publish its memory (timeout after " + std::to_string(meeting_.timeout.count()) + "ms; " +
               describe_self() + " waited for it). Did it fail, or has it no time?";
      };
      session = NodeSession::open(local, count, await({key}, late).front());
    }
  } catch (const TimeoutError&) {
    throw;
  } catch (const PeerError&) {
    throw;
  } catch (const Error& e) {
    // A rank that has died takes its memory with it.
    glance();
    fail(describe_self() + " cannot share memory with the ranks of its node in " + meeting_.group + ": " + e.what());
  }
  session->wait_attached(deadline_, [this] {
    if (Clock::now() >= next_glance_) glance();
  });
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
  try {
    return keys_.get_all(keys, deadline_);
  } catch (const TimeoutError&) {
    throw TimeoutError(late());
  }
}

void Rendezvous::fetch(StoreKeys& keys, const std::vector<std::string>& names,
                       const std::function<std::string()>& late) {
  try {
    keys.fetch(names, deadline_);
  } catch (const TimeoutError&) {
    throw TimeoutError(late());
  }
}

std::string Rendezvous::absent(const std::string& step) {
  std::vector<std::string> words;
  for (int rank = 0; rank < meeting_.size; ++rank) words.push_back(key_of(step, rank));
  std::vector<size_t> missing;
  std::string silence;
  try {
    missing = keys_.missing(words, kMostListed + 1, Deadline::after(kErrorPatience));
  } catch (const Error& e) {
    silence = std::string(" (nobody knows: ") + e.what() + ')';
  }
  return "rank " + (missing.empty() ? "0" : listed(missing)) + " of " + meeting_.group + " did not publish " +
         (missing.empty() ? "what all others did" : "where it is") + silence + " (timeout after " +
         std::to_string(meeting_.timeout.count()) + "ms; " + describe_self() +
         " waited for it). Was it started, did it fail, and is the store not left over from another run?";
}

void Rendezvous::glance() {
  constexpr std::chrono::milliseconds kBetweenGlances{200};
  try {
    ask_store(meeting_.store, Deadline::after(kErrorPatience), {},
              [all = trouble_](c10d::Store& store, const auto&) { all->check(store); });
    next_glance_ = Clock::now() + kBetweenGlances;
  } catch (const TimeoutError&) {
    next_glance_ = Deadline::never().at();  // a store that does not answer keeps nobody from going on
  }
}

std::string Rendezvous::report(const std::string& message) {
  const auto first = std::make_shared<std::string>();
  try {
    ask_store(
        meeting_.store, Deadline::after(kErrorPatience), {},
        [first, message, all = trouble_](c10d::Store& store, const auto&) { *first = all->report(store, message); });
    return *first;
  } catch (const Error&) {
    return message;  // the others find out at their timeouts
  }
}

}  // namespace ours
