#include "collectives/hierarchical/hierarchical_messages.h"

#include <algorithm>

#include "collectives/hierarchical/shared_failure.h"
#include "collectives/messages/posted_messages.h"

namespace ours {

std::shared_ptr<PointToPoint> make_hierarchical_point_to_point(const std::shared_ptr<NodeSession>& session,
                                                               const std::shared_ptr<TcpMesh>& messages,
                                                               const std::shared_ptr<TcpMesh>& calls) {
  return std::make_shared<PostedMessages>(std::make_unique<HierarchicalMessages>(session, messages, calls));
}

HierarchicalMessages::HierarchicalMessages(const std::shared_ptr<NodeSession>& session,
                                           const std::shared_ptr<TcpMesh>& mesh, const std::shared_ptr<TcpMesh>& calls)
    : session_(session),
      mesh_(mesh),
      inbox_(TcpMessages::make_inbox(mesh)),
      node_(session, inbox_),
      tcp_(mesh, calls, inbox_) {}

HierarchicalMessages::Way HierarchicalMessages::way_of(const Message& message) const {
  // What came from any source is still counted as such.
  if (message.op == Op::RecvAnySource) return kBoth;
  return message.peer != mesh_->rank() && node_.reaches(message.peer) ? kNode : kTcp;
}

// --- moving ----------------------------------------------------------------------------------------------------------

void HierarchicalMessages::reach(const Message& message) {
  if (way_of(message) == kTcp) tcp_.reach(message);
}

void HierarchicalMessages::add(const std::shared_ptr<Message>& message) {
  const Way way = way_of(*message);
  way == kNode ? node_.add(message) : tcp_.add(message);
  // A thread that rests may have looked elsewhere.
  if (under_way_[way].fetch_add(1) == 0 && resting_.load() != 0) ring();
}

bool HierarchicalMessages::progress(Messages& ended, Mover mover) {
  const auto before = static_cast<ptrdiff_t>(ended.size());
  bool moved = uses(kNode) && node_.progress(ended, mover);
  // Now and then, too, where nothing is expected: peers connect, and tell of failures.
  if (uses(kTcp) || Clock::now() >= next_look_) {
    moved = tcp_.progress(ended, mover) || moved;
    next_look_ = Clock::now() + kLookAround;
  }
  std::for_each(ended.begin() + before, ended.end(), [this](const auto& one) { --under_way_[way_of(*one)]; });
  return moved;
}

Messages HierarchicalMessages::take_all() {
  // In this order: the streams let go of the memory of receives before these are taken out.
  Messages all = tcp_.take_all();
  Messages sends = node_.take_all();
  all.insert(all.end(), sends.begin(), sends.end());
  for (auto& count : under_way_) count = 0;
  return all;
}

Messages HierarchicalMessages::posted() const {
  Messages all = tcp_.posted();
  node_.append_sends(all);
  return all;
}

// --- waiting ---------------------------------------------------------------------------------------------------------

void HierarchicalMessages::ring() {
  node_.ring();
  tcp_.ring();
}

bool HierarchicalMessages::rest(const std::function<bool()>& ready) {
  // Before it looks what is under way, as add() does it the other way round.
  ++resting_;
  bool time_to_look = true;
  try {
    time_to_look = !uses(kTcp) ? node_.rest(ready) : !uses(kNode) ? tcp_.rest(ready) : watch_both(ready);
  } catch (...) {
    fail(std::current_exception());
  }
  --resting_;
  return time_to_look;
}

bool HierarchicalMessages::watch_both(const std::function<bool()>& ready) {
  // No system call sleeps on both memory and sockets. So the sleeps end from time to time, and what comes over the
  // network waits at most a quarter longer than it has been waited for anyway.
  constexpr std::chrono::nanoseconds kLeast = std::chrono::microseconds(50), kMost = std::chrono::milliseconds(1);
  const TcpMesh::Waiting waiting(*mesh_);
  const auto began = Clock::now();
  Awake awake(session_->wait_policy());
  for (bool stays = true;;) {
    if (ready() || failed() || tcp_.has_heard()) return false;
    stays = stays && awake.moment([] { return false; });
    if (stays) continue;
    const auto waited = Clock::now() - began;
    if (waited >= kLookAround) return true;
    node_.doze(std::clamp<std::chrono::nanoseconds>(waited / 4, kLeast, kMost), ready);
  }
}

// --- failures --------------------------------------------------------------------------------------------------------

void HierarchicalMessages::check_can_complete(const Message& message) {
  Absent absent = way_of(message) == kTcp ? Absent{} : node_.absent(message);
  // For any message: this takes in what the connections have brought, and forgets what is for ranks that have left.
  const Absent elsewhere = tcp_.absent(message, [this](int rank) { return !node_.reaches(rank); });
  absent.ranks += elsewhere.ranks;
  if (!elsewhere.last.empty()) absent.last = elsewhere.last;
  absent.check(message, size());
  tcp_.check_connections();
}

void HierarchicalMessages::check() {
  share_failure(*mesh_, *session_);
  tcp_.check();
}

void HierarchicalMessages::fail(FailureKind kind, const std::string& message) noexcept {
  tcp_.fail(kind, message);
  share_failure(*mesh_, *session_);
}

void HierarchicalMessages::fail(const std::exception_ptr& error) noexcept {
  tcp_.fail(error);
  share_failure(*mesh_, *session_);
}

}  // namespace ours
