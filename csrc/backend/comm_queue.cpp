#include "backend/comm_queue.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>

#include "backend/collective_work.h"
#include "collectives/straggler_ledger.h"
#include "common/background_thread.h"
#include "common/deadline.h"
#include "common/interrupts.h"
#include "common/options.h"
#include "transport/wait.h"

namespace ours {

namespace {

/// The comm threads that stay when they find nothing to do: one runs, another takes over during callbacks.
constexpr int kSpareServers = 2;

/// Most callbacks return sooner than another thread would wake up.
constexpr std::chrono::microseconds kReturn{20};

/// How long an interrupted wait still waits for the operation to end.
constexpr std::chrono::milliseconds kInterruptPatience{100};

void set_affinity(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (const int error = ::pthread_setaffinity_np(::pthread_self(), sizeof(set), &set)) {
    TORCH_WARN("OURS_COMM_THREAD_AFFINITY names cores that cannot be used (", std::generic_category().message(error),
               "); it is ignored. Name cores that this process may run on");
  }
}

/// On Linux each thread has a niceness, and 0 stands for the calling thread.
void add_niceness(int64_t niceness) {
  if (niceness == 0) return;
  const int before = ::getpriority(PRIO_PROCESS, 0);  // cannot fail for the calling thread
  const auto wanted = std::clamp<int64_t>(before + niceness, -20, 19);
  if (::setpriority(PRIO_PROCESS, 0, static_cast<int>(wanted)) == 0) return;
  const int error = errno;
  TORCH_WARN_ONCE("OURS_COMM_NICE=", niceness, " asks for a niceness of ", wanted, ", which is not permitted (",
                  std::generic_category().message(error), "); communication threads stay at ", before,
                  ". Give the process CAP_SYS_NICE or a limit that allows it (ulimit -e ", 20 - wanted,
                  "), or choose 0 or more");
}

}  // namespace

CommQueue::ThreadRole& CommQueue::role() {
  thread_local ThreadRole own;
  return own;
}

void CommQueue::submit(const WorkPtr& work, Next next) {
  Lock lock(mutex_);
  const bool in_hook = running_ && runner_ == std::this_thread::get_id();
  if (!in_hook) end_begun(*work, next, lock);
  // From here on the lock is not released before the Work has its place.
  const uint64_t number = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  work->set_sequence(number);
  if (work->tells_all()) stops_.note_called(number);
  if (in_hook) {
    // This is called by a hook on the Work that this thread has just run, and the hook may wait for the new Work.
    queue_.push_back(work);
    while (!work->done() && !queue_.empty()) run_next(lock);
    return;
  }
  if (queue_.empty() && !running_) {
    if (next != Next::GoesOn) {
      run(work, lock, true);
      return;
    }
    if (begin(work, lock)) return;
  } else {
    queue_.push_back(work);
  }
  if (role().calls == nullptr) await_returning_server(lock);
  if (queue_.empty()) return;
  // The thread that runs a Work calls a server for what is queued meanwhile. If there are no servers, the caller waits.
  if ((running_ && servers_ > 0) || call_server()) return;
  lock.unlock();
  wait(*work, std::chrono::milliseconds(0));
}

CollectiveWork* CommQueue::begun() const {
  return !running_ && !queue_.empty() && queue_.front()->has_begun() ? queue_.front().get() : nullptr;
}

void CommQueue::end_begun(const CollectiveWork& before, Next next, Lock& lock) {
  CollectiveWork* const first = begun();
  if (first == nullptr || queue_.size() > 1 || !may_run()) return;
  // A thread that waits for a Work waits for those before it, too. Other threads must neither wait for peers nor run
  // foreign code.
  if (next != Next::Waits && (!first->ends_quietly() || before.is_of_device())) return;
  run_next(lock);
}

bool CommQueue::begin(const WorkPtr& work, Lock& lock) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  lock.unlock();
  const bool begun = options().inline_calls && work->begin();
  lock.lock();
  running_ = false;
  queue_.push_front(work);  // others may have come meanwhile
  if (waiters_ > 0) progress_.notify_all();
  if (stopping_) work_available_.notify_all();
  if (!begun || queue_.size() > 1) return false;
  return patrol_.leave() || call_server();
}

void CommQueue::attend() {
  Lock lock(mutex_);
  attend(lock);
}

void CommQueue::attend(const Lock& /*held*/) {
  if (begun() == nullptr || patrol_.is_due()) return;
  patrol_.hurry();
  call_server();  // there is one, or begin() would have returned false
}

bool CommQueue::needs_server() const {
  if (running_ || queue_.empty()) return false;
  return queue_.size() > 1 || begun() == nullptr || patrol_.is_due();
}

void CommQueue::await_returning_server(Lock& lock) {
  const auto end = Clock::now() + kReturn;
  while (!running_ && !queue_.empty() && servers_ > idle_ && Clock::now() < end) {
    lock.unlock();
    ::sched_yield();
    lock.lock();
  }
}

void CommQueue::run(const WorkPtr& work, Lock& lock, bool awaited) {
  const Callback::Running none(nullptr);
  const bool nested = running_;
  running_ = true;
  runner_ = std::this_thread::get_id();
  lock.unlock();
  const bool calls = work->execute(awaited);
  if (calls && nested) work->run_callbacks();
  lock.lock();
  running_ = nested;
  if (calls && !nested) ++calling_;
  if (waiters_ > 0) progress_.notify_all();
  if (nested) return;
  if (stopping_) work_available_.notify_all();
  // A comm thread takes the next Work itself, unless it is in a callback or has callbacks to run.
  const bool goes_on = role().serves == this && role().calls == nullptr && !calls;
  if (!queue_.empty() && !goes_on) call_server();
  if (calls) run_callbacks(*work, lock);
}

void CommQueue::run_callbacks(CollectiveWork& work, Lock& lock) {
  lock.unlock();
  const ThreadRole before = role();
  role().calls = this;
  work.run_callbacks();
  role() = before;
  lock.lock();
  --calling_;
  if (waiters_ > 0) progress_.notify_all();
}

void CommQueue::run_next(Lock& lock) {
  WorkPtr work = std::move(queue_.front());
  queue_.pop_front();
  run(work, lock, false);
  // This may be the last reference, with which tensors and Python callbacks go: that must not happen under the lock.
  lock.unlock();
  work.reset();
  lock.lock();
}

bool CommQueue::wait(const CollectiveWork& work, std::chrono::milliseconds timeout) {
  if (work.done()) {
    ledger_->waited(Clock::duration::zero(), last_sequence());
    return true;
  }
  const auto began = Clock::now();
  const bool bounded = timeout.count() > 0;
  const Deadline deadline = bounded ? Deadline::after(timeout) : Deadline::never();
  Interrupts interrupts;
  std::optional<Deadline> patience;
  Lock lock(mutex_);
  if (bounded || !may_run()) attend(lock);
  ++waiters_;
  while (!work.done()) {
    // A bounded wait does not run operations, because it could not stop at its limit.
    if (!bounded && may_run() && !queue_.empty()) {
      run_next(lock);
      continue;
    }
    lock.unlock();
    const auto done = [&work] { return work.done(); };
    for (Awake awake(WaitPolicy{std::chrono::microseconds(options().yield_us)}); !done() && awake.moment(done);) {
      if (bounded && deadline.passed()) break;
    }
    lock.lock();
    const auto woken = [&] { return work.done() || (!bounded && may_run() && !queue_.empty()); };
    while (!woken() && !deadline.passed() && !(patience && patience->passed())) {
      sleep(lock, deadline.at());
      if (!interrupts.due()) continue;
      lock.unlock();
      if (const std::string name = interrupts.look(); !name.empty()) {
        work.interrupt(name);
        patience = Deadline::after(kInterruptPatience);
      }
      lock.lock();
    }
    if (!woken()) break;
  }
  --waiters_;
  lock.unlock();
  ledger_->waited(Clock::now() - began, last_sequence());
  // An operation that another thread runs may take long to notice that it has to end.
  if (!work.done() && patience) throw_interrupt();
  return work.done();
}

void CommQueue::sleep(Lock& lock, Clock::time_point end) {
  progress_.wait_until(lock, std::min(end, Clock::now() + Interrupts::kBetweenLooks));
}

void CommQueue::drain() {
  Interrupts interrupts;
  Lock lock(mutex_);
  ++waiters_;
  const auto others_run = [&] {
    return (running_ && runner_ != std::this_thread::get_id()) || (role().calls != this && calling_ > 0);
  };
  if (!may_run()) attend(lock);
  while (!queue_.empty() || others_run()) {
    if (may_run() && !queue_.empty()) {
      run_next(lock);
    } else {
      sleep(lock, Deadline::never().at());
    }
    if (!interrupts.due()) continue;
    lock.unlock();
    const std::string name = interrupts.look();
    lock.lock();
    if (!name.empty()) break;
  }
  --waiters_;
}

void CommQueue::wait_idle(std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  Lock lock(mutex_);
  attend(lock);
  ++waiters_;
  progress_.wait_until(lock, deadline.at(), [&] { return queue_.empty() && !running_; });
  --waiters_;
}

bool CommQueue::busy() {
  Lock lock(mutex_);
  if (CollectiveWork* const first = begun(); first != nullptr && first->ends_quietly() && may_run()) {
    run_next(lock);
  }
  return running_ || !queue_.empty();
}

void CommQueue::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  work_available_.notify_all();
}

void CommQueue::wait_stopped(std::chrono::milliseconds limit) {
  if (role().serves == this) return;
  const Deadline deadline = Deadline::after(limit);
  Lock lock(mutex_);
  if (running_ && runner_ == std::this_thread::get_id()) return;
  ++waiters_;
  progress_.wait_until(lock, deadline.at(), [&] { return servers_ == 0; });
  --waiters_;
}

bool CommQueue::call_server() {
  if (idle_ > 0) {
    work_available_.notify_one();
    return true;
  }
  try {
    start_background_thread("ours_comm", [self = shared_from_this()] { self->serve(); });
  } catch (const std::system_error&) {
    no_thread_ = true;
    progress_.notify_all();
    return servers_ > 0;  // a comm thread will come back to the queue
  }
  no_thread_ = false;
  ++servers_;
  ++idle_;
  return true;
}

void CommQueue::serve() {
  set_affinity(affinity_);
  add_niceness(niceness_);
  role().serves = this;
  Lock lock(mutex_);
  while (true) {
    patrol_.sleep(
        work_available_, lock, [&] { return needs_server() || (stopping_ && !running_); },
        [&] { return begun() != nullptr; });
    --idle_;
    if (queue_.empty()) break;
    run_next(lock);
    // The thread that runs a Work takes care of the rest of the queue.
    if (idle_ >= kSpareServers && (running_ || queue_.empty())) break;
    ++idle_;
  }
  --servers_;
  progress_.notify_all();
}

}  // namespace ours
