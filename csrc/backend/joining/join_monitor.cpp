#include "backend/joining/join_monitor.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "backend/joining/store_keys.h"
#include "transport/topology.h"

namespace ours {

namespace {

/// Most groups are made sooner, and so never look.
constexpr std::chrono::milliseconds kBetweenChecks{250};

/// The prefix of the keys of this machine's ranks. Processes of one machine share it even if they play several nodes.
std::string machine_key(const std::string& prefix) { return prefix + "machine/" + node_identity("") + '/'; }

}  // namespace

JoinMonitor::JoinMonitor(std::string prefix, std::string self, std::string group)
    : prefix_(std::move(prefix)),
      self_(std::move(self)),
      group_(std::move(group)),
      next_check_(Clock::now() + kBetweenChecks) {}

void JoinMonitor::announce(c10d::Store& store) {
  const std::string machine = machine_key(prefix_);
  const int64_t place = store.add(machine + "count", 1);
  store.set(machine + std::to_string(place),
            std::to_string(::getpid()) + ' ' + std::to_string(start_of(::getpid())) + ' ' + self_);
}

void JoinMonitor::find_neighbours(c10d::Store& store) {
  const std::string machine = machine_key(prefix_);
  const size_t count = std::stoul(store.get_to_str(machine + "count"));
  while (counted_ < count) awaited_.push_back(machine + std::to_string(++counted_));
  if (awaited_.empty()) return;
  auto end = awaited_.end();
  // One that has been counted may not have written its entry yet, and may never do so.
  if (!store.check(awaited_)) {
    end = std::partition(awaited_.begin(), end, [&](const std::string& key) { return store.check({key}); });
  }
  const std::vector<std::string> keys(awaited_.begin(), end);
  awaited_.erase(awaited_.begin(), end);
  if (keys.empty()) return;
  for (const std::string& text : values_in(store, keys)) {
    std::istringstream entry(text);
    pid_t pid = 0;
    uint64_t start = 0;
    std::string name;
    entry >> pid >> start >> std::ws;
    std::getline(entry, name);
    neighbours_.push_back({name, pid == ::getpid() ? ProcessWatch() : ProcessWatch(pid, start)});
  }
}

void JoinMonitor::check(c10d::Store& store, bool at_once) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!at_once && Clock::now() < next_check_) return;
  next_check_ = Clock::now() + kBetweenChecks;
  if (store.check({prefix_ + "error"})) raise(store.get_to_str(prefix_ + "error"));
  find_neighbours(store);
  for (const Neighbour& neighbour : neighbours_) {
    if (!neighbour.watch.ended()) continue;
    raise(report(store,
                 text_of(FailureKind::Peer, neighbour.name + " died while " + group_ + " was being made; noticed by " +
                                                self_ + ". Start the ranks again")));
  }
}

std::string JoinMonitor::text_of(FailureKind kind, const std::string& message) {
  return std::to_string(static_cast<uint32_t>(kind)) + ' ' + message;
}

void JoinMonitor::raise(const std::string& report) {
  std::istringstream in(report);
  uint32_t kind = 0;
  in >> kind;
  in.get();
  throw_as(static_cast<FailureKind>(kind), {std::istreambuf_iterator<char>(in), {}});
}

std::string JoinMonitor::report(c10d::Store& store, const std::string& message) {
  return store.compareSet(prefix_ + "error", "", message);
}

}  // namespace ours
