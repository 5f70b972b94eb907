#include "common/interrupts.h"

#include <atomic>
#include <utility>

namespace ours {

namespace {

std::atomic<Interrupt (*)()> check_signals{nullptr};

struct ThreadState {
  // A plain pointer, since a destructor would run after the language that it came from has ended.
  std::exception_ptr* raised = nullptr;
  bool in_handler = false;
};

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

}  // namespace

void set_interrupt_check(Interrupt (*check)()) { check_signals = check; }

bool Interrupts::due() {
  if (check_signals.load(std::memory_order_relaxed) == nullptr || thread_state().in_handler) return false;
  const auto now = Clock::now();
  if (next_ == Clock::time_point{}) {
    next_ = now + kBetweenLooks;
    return false;
  }
  return now >= next_;
}

std::string Interrupts::look() {
  if (!due()) return "";
  next_ = Clock::time_point{};
  ThreadState& state = thread_state();
  state.in_handler = true;
  Interrupt interrupt = check_signals.load()();
  state.in_handler = false;
  if (interrupt.name.empty()) return "";
  delete state.raised;
  // NOLINTNEXTLINE(bugprone-throw-keyword-missing): it is kept until throw_interrupt().
  state.raised = new std::exception_ptr(std::move(interrupt.error));
  return interrupt.name;
}

std::string describe_interrupt(const std::string& who, const std::string& name, const std::string& during) {
  return who + " was interrupted (" + name + ") " + during + ". The group cannot be used any more; make a new one";
}

bool was_interrupted() { return thread_state().raised != nullptr; }

void throw_interrupt() {
  std::exception_ptr* const raised = std::exchange(thread_state().raised, nullptr);
  if (raised == nullptr) return;
  const std::exception_ptr error = *raised;
  delete raised;
  std::rethrow_exception(error);
}

bool in_signal_handler() { return thread_state().in_handler; }

}  // namespace ours
