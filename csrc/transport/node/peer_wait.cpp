#include "transport/node/peer_wait.h"

#include "common/error.h"
#include "common/interrupts.h"
#include "transport/failure_kind.h"
#include "transport/wait.h"

namespace ours {

void await_peer(NodeSession& session, int bell, const PeerWait& wait, const std::function<bool()>& ready) {
  session.failure().check();
  Interrupts interrupts;
  bool is_ready = false;
  const auto look = [&] { return is_ready = is_ready || ready(); };
  const auto look_around = [&] {
    session.failure().check();
    session.check_interrupts(interrupts, wait.what);
    const char* const why = session.absence(wait.peer);
    // It may have done it, and then ended, since we looked.
    if (why != nullptr && !look()) session.lost(wait.peer, why, wait.what());
    if (is_ready || !wait.deadline.passed()) return;
    const std::string late = timed_out(wait.what(), wait.deadline, session.describe(session.rank()),
                                       {session.describe(wait.peer), session.call_roll({wait.peer})});
    if (wait.fails_session) session.failure().raise(FailureKind::Timeout, late);
    throw TimeoutError(late);
  };
  wait_on(session.block(bell).doorbell, session.wait_policy(), wait.deadline, look, look_around);
}

}  // namespace ours
