#pragma once

#include <exception>
#include <string>

#include "common/deadline.h"

namespace ours {

/// What a signal handler of the program has raised.
struct Interrupt {
  std::string name;          ///< such as KeyboardInterrupt; empty if nothing was raised
  std::exception_ptr error;  ///< what to throw to the interrupted caller
};

/// Sets the function that runs the program's handlers of signals that have arrived, if they run on the calling thread.
/// Until the layer of the language that has handlers calls this, no wait is interrupted.
void set_interrupt_check(Interrupt (*check)());

/// Lets signal handlers run now and then during a wait, so that a program can be interrupted. Use one object for each
/// wait, however many sleeps it consists of: a short wait checks nothing.
class Interrupts {
 public:
  static constexpr std::chrono::milliseconds kBetweenLooks{50};

  bool due();

  /// Runs handlers if it is time. Returns the name of what one of them has raised, or an empty string. If one has, the
  /// wait must end with an error, and throw_interrupt() throws what was raised. Called without locks that a handler
  /// might need.
  std::string look();

 private:
  Clock::time_point next_{};
};

/// The message for all ranks of a group after look() has returned `name` on the rank `who`. `during` says what that
/// rank was waiting for, and begins with "during" or "while".
std::string describe_interrupt(const std::string& who, const std::string& name, const std::string& during);

/// Whether look() has reported something on this thread that has not been thrown yet.
bool was_interrupted();

/// Throws what look() has reported on this thread, if that has not been thrown yet. Called at the end of an interrupted
/// call.
void throw_interrupt();

/// Whether this thread is in a signal handler that look() runs, with the interrupted operation still under way.
bool in_signal_handler();

}  // namespace ours
