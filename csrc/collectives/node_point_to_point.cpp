#include "collectives/node_point_to_point.h"

#include <system_error>

#include "common/background_thread.h"
#include "common/error.h"

namespace ours {

namespace {

/// Whether this thread is in a callback of a transfer. It runs no others then: they might wait for the one below them
/// on the stack.
bool& in_callback() {
  thread_local bool inside = false;
  return inside;
}

}  // namespace

NodePointToPoint::NodePointToPoint(std::shared_ptr<NodeSession> session)
    : session_(std::move(session)), queue_(*session_) {}

std::shared_ptr<PointToPoint> make_node_point_to_point(std::shared_ptr<NodeSession> session) {
  return std::make_shared<NodePointToPoint>(std::move(session));
}

std::shared_ptr<Transfer> NodePointToPoint::send(ConstSpan buffer, DType dtype, int dst, int tag, Deadline deadline,
                                                 TransferDone done) {
  if (dst < 0 || dst >= session_->size()) {
    throw InvalidArgument("send to rank " + std::to_string(dst) + " in a group of " + std::to_string(session_->size()) +
                          " ranks; give a rank of the group");
  }
  return post(std::make_shared<Message>(Op::Send, const_cast<void*>(buffer.data), buffer.bytes, dtype, dst, tag,
                                        deadline, std::move(done)));
}

std::shared_ptr<Transfer> NodePointToPoint::recv(Span buffer, DType dtype, int src, int tag, Deadline deadline,
                                                 TransferDone done) {
  if (src != kAnySource && (src < 0 || src >= session_->size())) {
    throw InvalidArgument("recv from rank " + std::to_string(src) + " in a group of " +
                          std::to_string(session_->size()) +
                          " ranks; give a rank of the group, or none for any source");
  }
  const Op op = src == kAnySource ? Op::RecvAnySource : Op::Recv;
  return post(std::make_shared<Message>(op, buffer.data, buffer.bytes, dtype, src, tag, deadline, std::move(done)));
}

std::shared_ptr<Transfer> NodePointToPoint::post(const std::shared_ptr<Message>& message) {
  Lock lock(mutex_);
  try {
    session_->failure().check();
    if (closing_) throw AbortedError("the group was closed; make a new one");
    queue_.add(message);
  } catch (...) {
    if (!closing_) session_->failure().fail(std::current_exception());
    message->set_error(std::current_exception());
    lock.unlock();
    if (const TransferCallbacks callbacks = message->finish()) callbacks();
    return message;
  }
  progress(lock, nullptr);
  if (!idle() && drivers_ == 0) leave_to_background(lock);
  return message;
}

void NodePointToPoint::wait(Transfer& transfer) {
  if (transfer.done()) return;
  Lock lock(mutex_);
  if (in_callback() && others_move()) {
    lock.unlock();
    while (!transfer.done()) rest([&] { return transfer.done(); });
    return;
  }
  ++drivers_;
  pause_background_.store(true);
  lock.unlock();
  drive(&drivers_, [&] { return transfer.done(); });
  lock.lock();
  if (--drivers_ > 0) return;
  pause_background_.store(closing_);
  if (!idle()) leave_to_background(lock);
}

bool NodePointToPoint::busy() {
  Lock lock(mutex_);
  return !queue_.empty() || !ended_.empty();
}

void NodePointToPoint::close() noexcept {
  if (session_->in_child()) return;
  Lock lock(mutex_);
  closing_ = true;
  pause_background_.store(true);
  wake_background_.notify_all();
  if (!idle()) end_all(lock, nullptr);
  signal(session_->self().doorbell);
}

bool NodePointToPoint::wait_closed(std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  if (background_ids_.count(std::this_thread::get_id()) != 0) return false;
  return background_ended_.wait_for(lock, limit, [&] { return backgrounds_ == 0; });
}

bool NodePointToPoint::others_move() {
  if (drivers_ > 0) return true;
  try {
    call_background();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

void NodePointToPoint::call_background() {
  if (closing_ && callbacks_.empty()) return;
  if (free_backgrounds_ > 0) {
    wake_background_.notify_one();
    return;
  }
  start_background_thread("ours_messages", [self = shared_from_this()] { self->run_background(); });
  ++backgrounds_;
  ++free_backgrounds_;
}

void NodePointToPoint::leave_to_background(Lock& lock) {
  try {
    call_background();
  } catch (const std::system_error& e) {
    session_->failure().fail(FailureKind::System, session_->describe(session_->rank()) +
                                                      " cannot start a thread for its messages: " + e.what() +
                                                      ". Raise the limit of threads (ulimit -u), or start fewer");
    end_all(lock, nullptr);
  }
}

template <class Ready>
bool NodePointToPoint::rest(Ready&& ready) {
  bool time_to_look = false;
  wait_on(
      session_->self().doorbell, session_->wait_policy(), Deadline::after(kLookAround),
      [&] { return time_to_look || ready(); }, [&] { time_to_look = true; });
  return time_to_look;
}

template <class Stop>
void NodePointToPoint::drive(int* counter, Stop&& stop) {
  SleepWord& doorbell = session_->self().doorbell;
  bool time_to_look = false;
  while (!stop()) {
    // Read before progress(): what arrives later changes it, and ends the rest.
    const uint32_t heard = doorbell.value.load(std::memory_order_seq_cst);
    Lock lock(mutex_);
    if (progress(lock, counter)) continue;
    if ((time_to_look || session_->failure().failed()) && look_around()) {
      end_all(lock, counter);
      continue;
    }
    lock.unlock();
    time_to_look = rest([&] { return stop() || doorbell.value.load(std::memory_order_seq_cst) != heard; });
  }
}

bool NodePointToPoint::progress(Lock& lock, int* counter) {
  bool moved = false;
  try {
    moved = queue_.progress(ended_);
  } catch (...) {
    session_->failure().fail(std::current_exception());
  }
  return finish_ended(lock, counter) || moved;
}

bool NodePointToPoint::finish_ended(Lock& lock, int* counter) {
  if (ended_.empty() && callbacks_.empty()) return false;
  while (!ended_.empty()) {
    std::shared_ptr<Message> message = std::move(ended_.front());
    ended_.pop_front();
    lock.unlock();
    TransferCallbacks callbacks = message->finish();
    message.reset();  // with it may go tensors and callbacks: not under the lock
    lock.lock();
    if (callbacks) callbacks_.push_back(std::move(callbacks));
  }
  // Another thread may be asleep in wait() for one of these.
  signal(session_->self().doorbell);
  if (callbacks_.empty() || (in_callback() && others_move())) return true;
  run_callbacks(lock, counter);
  return true;
}

void NodePointToPoint::run_callbacks(Lock& lock, int* counter) {
  if (counter != nullptr) --*counter;
  while (!callbacks_.empty()) {
    TransferCallbacks call = std::move(callbacks_.front());
    callbacks_.pop_front();
    if (drivers_ == 0) {
      pause_background_.store(closing_);
      try {
        if (!idle()) call_background();
      } catch (const std::system_error&) {
        // This thread comes back, unless the callback waits for what nobody moves now.
      }
    }
    lock.unlock();
    const bool nested = in_callback();
    in_callback() = true;
    call();
    in_callback() = nested;
    call = nullptr;  // with it may go the last reference to a Work: not under the lock
    lock.lock();
  }
  if (counter != nullptr) ++*counter;
  pause_background_.store(closing_ || drivers_ > 0);
}

bool NodePointToPoint::look_around() {
  NodeFailure& failure = session_->failure();
  if (failure.failed()) return true;
  for (const auto& message : queue_.posted()) {
    const std::string what = message->describe() + " on " + session_->describe(session_->rank());
    if (message->deadline.passed()) {
      failure.fail(FailureKind::Timeout, what + ": Timed out waiting " +
                                             std::to_string(message->deadline.timeout().count()) +
                                             "ms for the peer. Does it make the matching call? Else raise the timeout");
      return true;
    }
    const int gone = vanished_peer(*message);
    if (gone >= 0) {
      failure.fail(FailureKind::Peer, session_->describe(gone) + ' ' + session_->absence(gone) + " during " + what +
                                          ". The group cannot be used any more; make a new one without it");
      return true;
    }
  }
  return false;
}

int NodePointToPoint::vanished_peer(const Message& message) const {
  int absent = 0;
  int last = -1;
  for (int r = 0; r < session_->size(); ++r) {
    if (r == session_->rank() || (message.peer != r && message.peer != kAnySource)) continue;
    // What it sent before it ended may still be on its way to us.
    if (session_->absence(r) == nullptr || (message.op != Op::Send && queue_.has_input(r))) continue;
    if (message.peer == r || session_->block(r).state.load() != kLeft) return r;
    ++absent;
    last = r;
  }
  // A receive from any source can go on until the last peer has left.
  return absent > 0 && absent == session_->size() - 1 ? last : -1;
}

void NodePointToPoint::end_all(Lock& lock, int* counter) {
  std::exception_ptr error = std::make_exception_ptr(AbortedError("the group was closed before the transfer ended"));
  try {
    session_->failure().check();
  } catch (...) {
    error = std::current_exception();
  }
  for (auto& message : queue_.take_all()) {
    message->set_error(error);
    ended_.push_back(std::move(message));
  }
  finish_ended(lock, counter);
}

void NodePointToPoint::run_background() {
  Lock lock(mutex_);
  background_ids_.insert(std::this_thread::get_id());
  while (true) {
    wake_background_.wait(lock, [&] { return closing_ || (drivers_ == 0 && !idle()); });
    if (closing_) {
      run_callbacks(lock, &free_backgrounds_);
      break;
    }
    lock.unlock();
    drive(&free_backgrounds_, [&] {
      if (pause_background_.load()) return true;
      const Lock look(mutex_);
      return idle();
    });
    lock.lock();
    // Another took over during a callback, and stays.
    if (free_backgrounds_ > 1) break;
  }
  background_ids_.erase(std::this_thread::get_id());
  --free_backgrounds_;
  --backgrounds_;
  background_ended_.notify_all();
}

}  // namespace ours
