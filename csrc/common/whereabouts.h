#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

// Tells where in its program a process is, for the error of ranks for which it is too late.
//
// A process that can be asked has a pipe, and a thread that sleeps until a question comes. A process on the same
// machine finds the pipe under /proc/PID/fd, as it finds the memory of its peers, and names a pipe of its own for the
// answer. So a process answers whatever its other threads do, unless it is stopped, or one of them keeps the
// interpreter's lock.

namespace ours {

/// Sets the function that says what the program is doing, as the end of a sentence: "is at train.py:41 in load". It is
/// called on a thread of its own.
void set_whereabouts(std::string (*describe)());

/// What this process would answer now.
std::string own_place();

/// Where a process on this machine can be asked. Its numbers may be shared with any process.
struct AskedProcess {
  int32_t pid = 0;
  int32_t fd = -1;     ///< of its pipe; negative: nobody can ask
  uint64_t inode = 0;  ///< the pipe's, by which it is recognised
};

/// This process. Makes the pipe and the thread, unless an earlier call has. If there is no descriptor or thread for
/// them, nobody can ask.
AskedProcess own_whereabouts();

/// How long ask_whereabouts() waits: the error of a rank that has waited too long must not take much longer.
constexpr std::chrono::milliseconds kAskingTime{300};

/// What each of the processes answers, or why it does not, as the end of a sentence.
std::vector<std::string> ask_whereabouts(const std::vector<AskedProcess>& processes);

}  // namespace ours
