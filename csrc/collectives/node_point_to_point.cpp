#include "collectives/node_point_to_point.h"

#include "common/error.h"

namespace ours {

NodePointToPoint::NodePointToPoint(std::shared_ptr<NodeSession> session)
    : session_(std::move(session)), queue_(*session_) {}

std::shared_ptr<PointToPoint> make_node_point_to_point(std::shared_ptr<NodeSession> session) {
  return std::make_shared<NodePointToPoint>(std::move(session));
}

NodePointToPoint::~NodePointToPoint() {
  if (session_->in_child()) {
    // The thread exists in the parent only, and the mutex may have been held there: touch neither.
    new std::thread(std::move(background_));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    pause_background_.store(true);
  }
  wake_background_.notify_all();
  futex_wake_all(session_->self().doorbell.value);
  if (background_.joinable()) background_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!queue_.empty()) end_all(lock);
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
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    session_->failure().check();
    queue_.add(message);
  } catch (...) {
    session_->failure().fail(std::current_exception());
    message->set_error(std::current_exception());
    lock.unlock();
    message->finish();
    return message;
  }
  progress(lock);
  if (!queue_.empty() && drivers_ == 0) {
    if (!background_.joinable()) background_ = std::thread([this] { run_background(); });
    wake_background_.notify_one();
  }
  return message;
}

void NodePointToPoint::wait(Transfer& transfer) {
  if (transfer.done()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++drivers_;
    pause_background_.store(true);
  }
  drive([&] { return transfer.done(); });
  std::lock_guard<std::mutex> lock(mutex_);
  if (--drivers_ > 0) return;
  pause_background_.store(closing_);
  if (!queue_.empty()) wake_background_.notify_one();
}

template <class Stop>
void NodePointToPoint::drive(Stop&& stop) {
  SleepWord& doorbell = session_->self().doorbell;
  bool time_to_look = false;
  while (!stop()) {
    // Read before progress(): what arrives later changes it, and ends the rest.
    const uint32_t heard = doorbell.value.load(std::memory_order_seq_cst);
    std::unique_lock<std::mutex> lock(mutex_);
    if (progress(lock)) continue;
    if ((time_to_look || session_->failure().failed()) && look_around()) {
      end_all(lock);
      continue;
    }
    lock.unlock();
    time_to_look = false;
    wait_on(
        doorbell, session_->wait_policy(), Deadline::after(kLookAround),
        [&] { return time_to_look || stop() || doorbell.value.load(std::memory_order_seq_cst) != heard; },
        [&] { time_to_look = true; });
  }
}

bool NodePointToPoint::progress(std::unique_lock<std::mutex>& lock) {
  MessageQueue::Messages ended;
  bool moved = false;
  try {
    moved = queue_.progress(ended);
  } catch (...) {
    session_->failure().fail(std::current_exception());
  }
  if (ended.empty()) return moved;
  lock.unlock();
  for (const auto& message : ended) message->finish();
  // Another thread may be asleep in wait() for one of these.
  if (!ended.empty()) signal(session_->self().doorbell);
  lock.lock();
  return true;
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

void NodePointToPoint::end_all(std::unique_lock<std::mutex>& lock) {
  const MessageQueue::Messages all = queue_.take_all();
  lock.unlock();
  std::exception_ptr error = std::make_exception_ptr(AbortedError("the group was destroyed before the transfer ended"));
  try {
    session_->failure().check();
  } catch (...) {
    error = std::current_exception();
  }
  for (const auto& message : all) {
    message->set_error(error);
    message->finish();
  }
  signal(session_->self().doorbell);
  lock.lock();
}

void NodePointToPoint::run_background() {
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_background_.wait(lock, [&] { return closing_ || (drivers_ == 0 && !queue_.empty()); });
      if (closing_) return;
    }
    drive([&] {
      if (pause_background_.load()) return true;
      std::lock_guard<std::mutex> lock(mutex_);
      return queue_.empty();
    });
  }
}

}  // namespace ours
