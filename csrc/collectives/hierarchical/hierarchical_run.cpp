#include "collectives/hierarchical/hierarchical_run.h"

#include "collectives/tcp/dissemination.h"

namespace ours {

void HierarchicalRun::open(const Exchanged& exchanged) {
  in_node([&] { rounds.open(running, exchanged); });
}

void HierarchicalRun::sync() {
  if (rounds.size() > 1) {
    in_node([&] { rounds.sync_and_pass_on(running); });
  } else {
    rounds.sync(running);
  }
}

void HierarchicalRun::agree() {
  if (map.is_leader()) {
    Dissemination all(leaders());
    wait([&] { return all.advance(); });
  }
  sync();
}

void HierarchicalRun::wait(const std::function<bool()>& done, bool needs_node) {
  tcp.run([&] {
    if (done()) return true;
    if (needs_node) watch.look_at_node();
    return false;
  });
}

void HierarchicalRun::push() {
  tcp.run([] { return true; });
}

}  // namespace ours
