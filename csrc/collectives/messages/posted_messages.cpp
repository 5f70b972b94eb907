#include "collectives/messages/posted_messages.h"

#include <system_error>
#include <utility>

#include "common/background_thread.h"
#include "common/error.h"

namespace ours {

namespace {

/// How long a long message lies at most until a thread sees to it. To wake one at once would cost the many that are
/// waited for as soon as they are posted more than the others gain. Where all are, even looking so often takes much of
/// the time of ranks that share cores.
constexpr std::chrono::microseconds kSoon{200};
constexpr std::chrono::microseconds kLater{2000};

/// Whether much of it can be moved before anybody waits for it.
bool is_long(const Message& message) { return message.bytes > size_t{64} << 10; }

}  // namespace

std::shared_ptr<Transfer> PostedMessages::send(ConstSpan buffer, DType dtype, int dst, int tag, TransferLimitPtr limit,
                                               TransferDone done) {
  if (dst < 0 || dst >= carrier_->size()) {
    throw InvalidArgument("send to rank " + std::to_string(dst) + " in a group of " + std::to_string(carrier_->size()) +
                          " ranks; give a rank of the group");
  }
  return post(std::make_shared<Message>(Op::Send, const_cast<void*>(buffer.data), buffer.bytes, dtype, dst, tag,
                                        std::move(limit), std::move(done)));
}

std::shared_ptr<Transfer> PostedMessages::recv(Span buffer, DType dtype, int src, int tag, TransferLimitPtr limit,
                                               TransferDone done) {
  if (src != kAnySource && (src < 0 || src >= carrier_->size())) {
    throw InvalidArgument("recv from rank " + std::to_string(src) + " in a group of " +
                          std::to_string(carrier_->size()) +
                          " ranks; give a rank of the group, or none for any source");
  }
  const Op op = src == kAnySource ? Op::RecvAnySource : Op::Recv;
  return post(
      std::make_shared<Message>(op, buffer.data, buffer.bytes, dtype, src, tag, std::move(limit), std::move(done)));
}

std::shared_ptr<Transfer> PostedMessages::post(const std::shared_ptr<Message>& message) {
  Lock lock(mutex_, std::defer_lock);
  bool lay = false;
  try {
    carrier_->check();
    // This may wait, and a signal handler may close this object meanwhile.
    carrier_->reach(*message);
    lock.lock();
    if (closing_) throw AbortedError("the group was closed; make a new one");
    lay = is_left();
    carrier_->add(message);
    long_messages_ += is_long(*message) ? 1 : 0;
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    if (!closing_) carrier_->fail(std::current_exception());
    message->set_error(std::current_exception());
    lock.unlock();
    if (const TransferCallbacks callbacks = message->finish()) callbacks();
    return message;
  }
  progress(lock, nullptr);
  if (is_left()) leave_to_background(lock, lay);
  return message;
}

void PostedMessages::wait(Transfer& transfer) {
  if (transfer.done()) return;
  static_cast<Message&>(transfer).limit->start();
  Lock lock(mutex_);
  if (long_messages_ > 0 && is_left()) patrol_.note_coming(kSoon);
  ++drivers_;
  pause_background_.store(true);
  lock.unlock();
  drive(&drivers_, [&] { return transfer.done(); });
  lock.lock();
  if (--drivers_ > 0) return;
  pause_background_.store(closing_);
  if (!idle()) leave_to_background(lock);
}

void PostedMessages::attend() {
  Lock lock(mutex_);
  if (!is_left() || needs_background()) return;
  patrol_.hurry();
  wake_background(lock);
}

void PostedMessages::call(TransferCallbacks callbacks) {
  Lock lock(mutex_);
  callbacks_.push_back(std::move(callbacks));
  finish_ended(lock, nullptr);
}

// NOLINTNEXTLINE(bugprone-exception-escape): the caller owns it, so shared_from_this() does not throw.
void PostedMessages::close() noexcept {
  if (carrier_->in_child()) return;
  Lock lock(mutex_);
  closing_ = true;
  pause_background_.store(true);
  wake_background_.notify_all();
  if (!idle()) end_all(lock, nullptr);
  carrier_->ring();
  carrier_->leave();
}

bool PostedMessages::wait_closed(std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  if (background_ids_.count(std::this_thread::get_id()) != 0) return false;
  return background_ended_.wait_for(lock, limit, [&] { return backgrounds_ == 0; });
}

void PostedMessages::call_background() {
  if (closing_ && callbacks_.empty()) return;
  if (free_backgrounds_ > 0) {
    wake_background_.notify_one();
    return;
  }
  start_background_thread("ours_messages", [self = shared_from_this()] { self->run_background(); });
  ++backgrounds_;
  ++free_backgrounds_;
}

void PostedMessages::leave_to_background(Lock& lock, bool lay) {
  if (leave(lay)) wake_background(lock);
}

bool PostedMessages::leave(bool lay) {
  const auto long_one = patrol_.looks_in_vain() ? kLater : kSoon;
  const bool looked_after = patrol_.leave(long_messages_ > 0 ? long_one : Patrol::kEvery, lay);
  return !looked_after || needs_background();
}

void PostedMessages::wake_background(Lock& lock) {
  try {
    call_background();
  } catch (const std::system_error& e) {
    carrier_->fail(FailureKind::System, carrier_->describe_self() + " cannot start a thread for its messages: " +
                                            e.what() + ". Raise the limit of threads (ulimit -u), or start fewer");
    end_all(lock, nullptr);
  }
}

template <class Stop>
void PostedMessages::drive(int* counter, Stop&& stop) {
  bool time_to_look = false;
  Interrupts interrupts;
  while (!stop()) {
    // Read before progress(): what arrives later changes it, and ends the rest.
    const uint32_t heard = carrier_->heard();
    Lock lock(mutex_);
    if (progress(lock, counter)) continue;
    if ((time_to_look || carrier_->failed()) && look_around()) {
      end_all(lock, counter);
      continue;
    }
    lock.unlock();
    time_to_look = carrier_->rest([&] { return stop() || carrier_->heard() != heard; });
    heed(interrupts);
  }
}

void PostedMessages::heed(Interrupts& interrupts) {
  const std::string name = interrupts.look();
  if (name.empty()) return;
  carrier_->fail(FailureKind::System,
                 describe_interrupt(carrier_->describe_self(), name, "while it waited for a message"));
}

bool PostedMessages::progress(Lock& lock, int* counter) {
  bool moved = false;
  try {
    const Mover mover = counter == nullptr ? Mover::Goes : counter == &drivers_ ? Mover::Waits : Mover::Other;
    moved = carrier_->progress(ended_, mover);
  } catch (...) {
    carrier_->fail(std::current_exception());
  }
  return finish_ended(lock, counter) || moved;
}

bool PostedMessages::finish_ended(Lock& lock, int* counter) {
  if (ended_.empty() && callbacks_.empty()) return false;
  while (!ended_.empty()) {
    std::shared_ptr<Message> message = std::move(ended_.front());
    ended_.pop_front();
    long_messages_ -= is_long(*message) ? 1 : 0;
    lock.unlock();
    TransferCallbacks callbacks = message->finish();
    message.reset();  // may drop tensors and callbacks, so not under the lock
    lock.lock();
    if (callbacks) callbacks_.push_back(std::move(callbacks));
  }
  // Another thread may be asleep in wait() for one of these messages.
  carrier_->ring();
  if (callbacks_.empty()) return true;
  if (counter != &free_backgrounds_) {
    try {
      call_background();
      return true;
    } catch (const std::system_error&) {
      // There is only this thread.
    }
  }
  run_callbacks(lock, counter);
  return true;
}

void PostedMessages::run_callbacks(Lock& lock, int* counter) {
  if (counter != nullptr) --*counter;
  while (!callbacks_.empty()) {
    TransferCallbacks call = std::move(callbacks_.front());
    callbacks_.pop_front();
    if (drivers_ == 0) pause_background_.store(closing_);
    try {
      if (!callbacks_.empty() || (is_left() && leave())) call_background();
    } catch (const std::system_error&) {
      // This thread comes back, unless the callback waits for something that no thread does now.
    }
    lock.unlock();
    call();
    call = nullptr;  // may drop the last reference to a Work, so not under the lock
    lock.lock();
  }
  if (counter != nullptr) ++*counter;
  pause_background_.store(closing_ || drivers_ > 0);
}

bool PostedMessages::look_around() {
  if (carrier_->failed()) return true;
  for (const auto& message : carrier_->posted()) {
    TransferLimit& limit = *message->limit;
    const auto what = [&] { return message->describe() + " on " + carrier_->describe_self(); };
    const auto late = [&] {
      return what() + ": Timed out waiting " + std::to_string(limit.timeout().count()) +
             "ms for the peer. If it makes the matching call, raise the timeout";
    };
    if (limit.passed()) {
      const std::string place = message->peer == kAnySource ? "" : carrier_->call_roll(message->peer);
      carrier_->fail(FailureKind::Timeout, late() + place);
      return true;
    }
    try {
      carrier_->check_can_complete(*message);
      tell_future(*message, false, [&] { return std::make_exception_ptr(TimeoutError(late())); });
    } catch (const PeerError& gone) {
      const std::string why = gone.what() + (" during " + what());
      if (!limit.started() && dynamic_cast<const PeerLeftError*>(&gone) != nullptr) {
        tell_future(*message, true, [&] { return std::make_exception_ptr(PeerError(why)); });
        continue;
      }
      carrier_->fail(FailureKind::Peer, why + ". The group cannot be used any more; make a new one without it");
      return true;
    } catch (...) {
      carrier_->fail(std::current_exception());
      return true;
    }
  }
  return false;
}

void PostedMessages::tell_future(const Message& message, bool hopeless,
                                 const std::function<std::exception_ptr()>& error) {
  if (TransferLimit::Late late = message.limit->take_late(hopeless)) {
    callbacks_.emplace_back([late = std::move(late), error = error()] { late(error); });
  }
}

void PostedMessages::end_all(Lock& lock, int* counter) {
  std::exception_ptr error = std::make_exception_ptr(AbortedError("the group was closed before the transfer ended"));
  try {
    carrier_->check();
  } catch (...) {
    error = std::current_exception();
  }
  for (auto& message : carrier_->take_all()) {
    message->set_error(error);
    ended_.push_back(std::move(message));
  }
  finish_ended(lock, counter);
}

void PostedMessages::run_background() {
  Lock lock(mutex_);
  background_ids_.insert(std::this_thread::get_id());
  while (true) {
    patrol_.sleep(wake_background_, lock, [&] { return closing_ || needs_background(); }, [&] { return is_left(); });
    run_callbacks(lock, &free_backgrounds_);
    if (closing_) break;
    lock.unlock();
    drive(&free_backgrounds_, [&] {
      if (pause_background_.load()) return true;
      const Lock look(mutex_);
      return idle();
    });
    lock.lock();
    // Another thread took over during a callback, and stays.
    if (free_backgrounds_ > 1) break;
  }
  background_ids_.erase(std::this_thread::get_id());
  --free_backgrounds_;
  --backgrounds_;
  background_ended_.notify_all();
}

}  // namespace ours
