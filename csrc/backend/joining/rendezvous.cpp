#include "backend/joining/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "common/listed.h"
#include "common/options.h"
#include "common/own_name.h"

namespace ours {

namespace {

/// How long an error waits for the store, which may not answer.
constexpr std::chrono::milliseconds kErrorPatience{400};

std::string key_of(const std::string& step, int rank) { return step + '/' + std::to_string(rank); }

int number_in(const std::string& text) {
  try {
    return std::stoi(text);
  } catch (const std::exception&) {
    throw Error("malformed entry '" + text.substr(0, 80) +
                "' in the store; do all ranks use one version of this package, and no other program the same store?");
  }
}

/// The part of "rank 2 (host node1, pid 4711)" in parentheses.
std::string name_in(const std::string& text) { return text.substr(std::min(text.find('('), text.size())); }

std::string number_of_attempt(const Meeting& meeting, Deadline deadline) {
  const int64_t number = ask_store(meeting.store, deadline,
                                   [key = "ours/attempts/" + std::to_string(meeting.rank)](
                                       c10d::Store& store, const auto&) { return store.add(key, 1); });
  return std::to_string(number);
}

}  // namespace

Rendezvous::Rendezvous(const Meeting& meeting)
    : meeting_(meeting),
      deadline_(Deadline::after(meeting.timeout)),
      prefix_("ours/" + number_of_attempt(meeting, deadline_) + "/"),
      monitor_(std::make_shared<JoinMonitor>(prefix_, describe_self(), meeting.group)),
      keys_(meeting.store, prefix_, terms()) {
  ask_store(meeting.store, deadline_,
            [monitor = monitor_](c10d::Store& store, const auto&) { monitor->announce(store); });
}

StoreKeys::Terms Rendezvous::terms() const {
  // All ranks together check about a thousand times a second, which leaves time to the store and its cores.
  const std::chrono::milliseconds pause(std::clamp(meeting_.size, 10, 250));
  return {deadline_, [monitor = monitor_](c10d::Store& store) { monitor->check(store); }, pause};
}

std::string Rendezvous::describe_self() const { return describe_own(meeting_.rank); }

StorePtr Rendezvous::store(const std::string& name) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_ + name, meeting_.store);
}

std::shared_ptr<StoreKeys> Rendezvous::keys(const std::string& name) const {
  return std::make_shared<StoreKeys>(meeting_.store, prefix_ + name + '/', terms());
}

Topology Rendezvous::find_topology(std::string& rules) {
  std::unique_ptr<NodeProbe> probe;
  try {
    probe = std::make_unique<NodeProbe>();
  } catch (const MemoryRefused& e) {
    TORCH_WARN_ONCE(e.what(), ". ", describe_self(), " talks to all ranks over TCP, which is slower");
  } catch (const Error& e) {
    fail(describe_self() + " cannot make shared memory for " + meeting_.group + ": " + e.what());
  }
  // The probe has to exist until all ranks have looked at it, which they have once there is a topology.
  const int leader = probe ? find_leader(*probe) : meeting_.rank;
  const std::string own = std::to_string(leader) + ' ' + process_name(host_name(), ::getpid());
  std::istringstream result(round("leader", own, [&rules](const std::vector<std::string>& all) {
    std::vector<int> leaders;
    std::string names;
    for (const std::string& one : all) {
      leaders.push_back(number_in(one));
      names += '\n' + name_in(one);
    }
    return Topology::of(leaders).text() + '\n' + rules + names;
  }));
  std::string text;
  std::getline(result, text);
  std::getline(result, rules);
  for (std::string name; std::getline(result, name);) names_.push_back(name);
  if (names_.size() != static_cast<size_t>(meeting_.size)) names_.clear();
  return Topology::parse(text, meeting_.size);
}

int Rendezvous::find_leader(const NodeProbe& probe) {
  const std::string identity = node_identity(options().node_id);
  const std::string self = std::to_string(meeting_.rank) + ' ' + probe.address();
  // The rank that first claims a place leads those that can read its memory; the others try the next place.
  for (int place = 0; place < meeting_.size; ++place) {
    const std::string leader = keys_.claim("node/" + identity + '/' + std::to_string(place), self, deadline_);
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
    // A rank that dies takes its memory with it, a moment before it counts as dead. Its death is the better reason.
    constexpr std::chrono::milliseconds kDying{200}, kBetweenLooks{10};
    for (const Deadline end = Deadline::after(kDying); !end.passed(); std::this_thread::sleep_for(kBetweenLooks)) {
      check_peers(true);
    }
    fail(describe_self() + " cannot share memory with the ranks of its node in " + meeting_.group + ": " + e.what());
  }
  session->widen(topology.ranks_of(topology.node_of(meeting_.rank)));
  try {
    session->wait_attached(deadline_, [this] {
      if (Clock::now() >= next_check_) check_peers();
    });
  } catch (const TimeoutError& e) {
    if (!store_is_silent_) throw;
    throw StoreSilent(std::string(e.what()) + " They may wait for the store of the process group, which does not " +
                      "answer. Is the process that serves it stopped?");
  }
  return session;
}

void Rendezvous::arrive(const std::string& step) {
  round(step, "here", [](const std::vector<std::string>&) { return std::string("all"); });
}

std::string Rendezvous::round(const std::string& step, const std::string& value,
                              const std::function<std::string(const std::vector<std::string>&)>& combine) {
  const auto late = [&] { return absent(step); };
  const std::string result = step + "s";
  keys_.set(key_of(step, meeting_.rank), value);
  if (meeting_.rank != 0) return await({result}, late).front();
  std::vector<std::string> keys;
  for (int rank = 0; rank < meeting_.size; ++rank) keys.push_back(key_of(step, rank));
  const std::vector<std::string> values = await(keys, late);
  std::string text;
  try {
    text = combine(values);
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
  } catch (const StoreSilent& e) {
    throw StoreSilent(meeting_.group + " could not be made: " + e.what() + " (timeout after " +
                      std::to_string(meeting_.timeout.count()) + "ms; " + describe_self() + " waited for it)");
  } catch (const TimeoutError&) {
    throw TimeoutError(late());
  }
}

std::string Rendezvous::absent(const std::string& step) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < meeting_.size; ++rank) keys.push_back(key_of(step, rank));
  std::vector<size_t> missing;
  std::string silence;
  try {
    missing = keys_.missing(keys, kMostListed + 1, Deadline::after(kErrorPatience));
  } catch (const Error& e) {
    silence = std::string(" (the store does not tell: ") + e.what() + ')';
  }
  return "rank " + (missing.empty() ? "0" : listed(missing)) + " of " + meeting_.group + " did not publish " +
         (missing.empty() ? "what all others did" : "where it is") + silence + " (timeout after " +
         std::to_string(meeting_.timeout.count()) + "ms; " + describe_self() +
         " waited for it). Was it started, did it fail, and is the store not left over from another run?";
}

void Rendezvous::check_peers(bool at_once) {
  constexpr std::chrono::milliseconds kBetweenChecks{200};
  try {
    ask_store(meeting_.store, Deadline::after(kErrorPatience),
              [monitor = monitor_, at_once](c10d::Store& store, const auto&) { monitor->check(store, at_once); });
    next_check_ = Clock::now() + kBetweenChecks;
  } catch (const StoreSilent&) {
    store_is_silent_ = true;
    next_check_ = Deadline::never().at();  // a store that does not answer holds up no rank
  }
}

std::string Rendezvous::report(FailureKind kind, const std::string& message) {
  const std::string own = JoinMonitor::text_of(kind, message);
  try {
    return ask_store(
        meeting_.store, Deadline::after(kErrorPatience),
        [own, monitor = monitor_](c10d::Store& store, const auto&) { return monitor->report(store, own); });
  } catch (const Error&) {
    return own;  // the others find out at their timeouts
  }
}

}  // namespace ours
