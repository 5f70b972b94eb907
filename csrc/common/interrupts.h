#pragma once

#include <exception>
#include <string>

#include "common/deadline.h"

namespace ours {

/// What a signal handler of the program has raised.
struct Interrupt {
  std::string name;          ///< such as KeyboardInterrupt; empty: nothing
  std::exception_ptr error;  ///< what the interrupted caller is to get
};

/// Lets the handlers of signals that have come run, where this thread is the one on which they do. The layer whose
/// language has such handlers says how; without it nobody is ever interrupted.
void set_interrupt_check(Interrupt (*check)());

/// What a wait asks now and then, so that a program can be interrupted in it. One object for each wait, however many
/// sleeps it consists of: a wait that is soon over asks nothing.
class Interrupts {
 public:
  static constexpr std::chrono::milliseconds kBetweenLooks{50};

  /// Whether it is time to look().
  bool due();

  /// Runs handlers, if it is time. The name of what one of them has raised, or an empty string; the wait is to end with
  /// an error then, and throw_interrupt() has what was raised. The caller holds no lock that a handler might want.
  std::string look();

 private:
  Clock::time_point next_{};
};

/// The message for all ranks of a group after look() has told of `name` on the rank `who`. `during` is what it waited
/// for, with "during" or "while".
std::string describe_interrupt(const std::string& who, const std::string& name, const std::string& during);

/// Whether look() has told of something on this thread that was not thrown yet.
bool was_interrupted();

/// Throws what look() has told of on this thread, unless that was thrown already: at the end of what was interrupted.
void throw_interrupt();

/// Whether this thread is in a signal handler that look() runs. What it interrupted is under way still.
bool in_signal_handler();

}  // namespace ours
