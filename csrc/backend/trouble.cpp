#include "backend/trouble.h"

#include <unistd.h>

#include <sstream>

#include "common/error.h"
#include "transport/topology.h"

namespace ours {

namespace {

/// Before the message of a death, which others throw as the same type of error.
constexpr char kDeath = '\n';

/// Before the places of the ranks of this machine, which processes share that play several nodes.
std::string machine_key(const std::string& prefix) { return prefix + "machine/" + node_identity("") + '/'; }

[[noreturn]] void raise(const std::string& report) {
  if (report.front() == kDeath) throw PeerError(report.substr(1));
  throw Error(report);
}

}  // namespace

Trouble::Trouble(std::string prefix, std::string self, std::string group)
    : prefix_(std::move(prefix)), self_(std::move(self)), group_(std::move(group)) {}

void Trouble::announce(c10d::Store& store) {
  const std::string machine = machine_key(prefix_);
  const int64_t place = store.add(machine + "count", 1);
  store.set(machine + std::to_string(place), std::to_string(::getpid()) + ' ' + self_);
}

void Trouble::meet(c10d::Store& store) {
  const std::string machine = machine_key(prefix_);
  while (true) {
    const auto place = static_cast<int>(neighbours_.size()) + 1;
    const std::string key = machine + std::to_string(place);
    if (!store.check({key})) return;
    std::istringstream word(store.get_to_str(key));
    pid_t pid = 0;
    std::string name;
    word >> pid >> std::ws;
    std::getline(word, name);
    neighbours_[place] = {name, pid == ::getpid() ? ProcessWatch() : ProcessWatch(pid)};
  }
}

void Trouble::check(c10d::Store& store) {
  constexpr std::chrono::milliseconds kBetweenLooks{250};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kBetweenLooks;
  if (store.check({prefix_ + "error"})) raise(store.get_to_str(prefix_ + "error"));
  meet(store);
  for (const auto& [place, neighbour] : neighbours_) {
    if (!neighbour.watch.ended()) continue;
    raise(report(store, kDeath + neighbour.name + " died while " + group_ + " was being made; noticed by " + self_ +
                            ". Start the ranks again"));
  }
}

std::string Trouble::report(c10d::Store& store, const std::string& message) {
  return store.compareSet(prefix_ + "error", "", message);
}

}  // namespace ours
