#include "collectives/node/node_messages.h"

#include "collectives/messages/posted_messages.h"
#include "common/error.h"

namespace ours {

std::shared_ptr<PointToPoint> make_node_point_to_point(std::shared_ptr<NodeSession> session) {
  return std::make_shared<PostedMessages>(std::make_unique<NodeMessages>(std::move(session)));
}

bool NodeMessages::rest(const std::function<bool()>& ready) {
  bool time_to_look = false;
  wait_on(
      doorbell(), session_->wait_policy(), Deadline::after(kLookAround), [&] { return time_to_look || ready(); },
      [&] { time_to_look = true; });
  return time_to_look;
}

void NodeMessages::check_can_complete(const Message& message) {
  int absent = 0;
  int last = -1;
  for (int r = 0; r < size(); ++r) {
    if (r == session_->rank() || (message.peer != r && message.peer != kAnySource)) continue;
    // What the peer sent before it ended may still be on its way to us.
    if (session_->absence(r) == nullptr || (message.op != Op::Send && queue_.has_input(r))) continue;
    last = r;
    if (message.peer == r || session_->block(r).state.load() != kLeft) {
      absent = size() - 1;
      break;
    }
    ++absent;
  }
  // A receive from any source can go on until the last peer has left.
  if (absent < size() - 1 || last < 0) return;
  const std::string why = session_->describe(last) + ' ' + session_->absence(last);
  if (session_->block(last).state.load() == kLeft) throw PeerLeftError(why);
  throw PeerError(why);
}

}  // namespace ours
