#include "common/whereabouts.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <mutex>
#include <type_traits>

#include "common/background_thread.h"
#include "common/deadline.h"
#include "common/fd.h"
#include "common/process_wide.h"
#include "common/shared_memory.h"
#include "common/whole_characters.h"

namespace ours {

namespace {

std::atomic<std::string (*)()> describe_program{nullptr};

struct Question {
  AskedProcess from;
  uint32_t number;  ///< which of the asked processes this one is
  uint32_t unused = 0;
};

struct Answer {
  uint32_t number;
  char text[1020];
};
// Smaller writes are not mixed with those of others.
static_assert(sizeof(Question) <= PIPE_BUF && sizeof(Answer) <= PIPE_BUF);
// Padding would carry whatever was in this process's memory to another one.
static_assert(std::has_unique_object_representations_v<Question> && std::has_unique_object_representations_v<Answer>);

/// Both ends of a process's pipe. With both, writing never raises SIGPIPE. Invalid if it cannot be opened, or is not
/// that pipe any more.
Fd open_pipe(const AskedProcess& process) {
  if (process.fd < 0) return Fd();
  Fd fd(::open(descriptor_path(process.pid, process.fd).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  struct stat facts{};
  if (!fd.valid() || ::fstat(fd.get(), &facts) != 0) return Fd();
  return S_ISFIFO(facts.st_mode) && facts.st_ino == process.inode ? std::move(fd) : Fd();
}

/// A pipe whose ends are one descriptor.
Fd make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return Fd();
  const Fd read_end(ends[0]), write_end(ends[1]);
  return Fd(::open(descriptor_path(::getpid(), read_end.get()).c_str(), O_RDWR | O_CLOEXEC));
}

AskedProcess owner_of(const Fd& pipe) {
  struct stat facts{};
  if (!pipe.valid() || ::fstat(pipe.get(), &facts) != 0) return {};
  return {::getpid(), pipe.get(), facts.st_ino};
}

/// Where this process is asked.
struct OwnPipe {
  AskedProcess self;
  Fd pipe;  // invalid until it can be asked

  void in_child() { *this = {}; }
};

void answer(const Question& question) {
  const Fd pipe = open_pipe(question.from);
  if (!pipe.valid()) return;  // nobody waits any more
  Answer answer{question.number, {}};
  const std::string text = own_place();
  std::memcpy(answer.text, text.data(), whole_characters(text, sizeof(answer.text) - 1));
  if (::write(pipe.get(), &answer, sizeof(answer)) < 0) return;  // the pipe is full of other answers
}

void answer_questions(int pipe) {
  Question question{};
  while (::read(pipe, &question, sizeof(question)) == sizeof(question)) {
    try {
      answer(question);
    } catch (const std::exception&) {
      // Out of memory, say: the one that asks does not wait for ever.
    }
  }
}

/// The letter for the state of a process in /proc: 'T' if it is stopped. 0 if it cannot be read.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t end_of_name = text.rfind(") ");  // the name may contain anything
  return end_of_name == std::string::npos || end_of_name + 2 >= text.size() ? '\0' : text[end_of_name + 2];
}

/// Why a process cannot answer; empty if there is no reason.
std::string hindrance(pid_t pid) {
  switch (state_of(pid)) {
    case 'T':
      return "is stopped (SIGSTOP, or Ctrl-Z)";
    case 't':
      return "is stopped by a debugger";
    case 'Z':
    case 'X':
      return "has ended";
    default:
      return "";
  }
}

std::string silence(pid_t pid) {
  std::string why = hindrance(pid);
  if (!why.empty()) return why;
  return "did not say within " + std::to_string(kAskingTime.count()) + " ms where it is (" +
         (state_of(pid) == 'D' ? "it waits in the kernel, for a file system or a device"
                               : "a native function may keep Python's global lock") +
         ")";
}

}  // namespace

void set_whereabouts(std::string (*describe)()) { describe_program = describe; }

std::string own_place() {
  const auto describe = describe_program.load();
  return describe == nullptr ? "runs, but cannot tell where it is" : describe();
}

AskedProcess own_whereabouts() {
  auto& own = ProcessWide<OwnPipe>::get();
  const std::lock_guard<std::mutex> lock(own.mutex);
  if (own.value.pipe.valid()) return own.value.self;
  Fd pipe = make_pipe();
  if (!pipe.valid()) return {};
  try {
    start_background_thread("ours_where", [fd = pipe.get()] { answer_questions(fd); });
  } catch (const std::exception&) {
    return {};
  }
  own.value = {owner_of(pipe), std::move(pipe)};
  return own.value.self;
}

std::vector<std::string> ask_whereabouts(const std::vector<AskedProcess>& processes) {
  std::vector<std::string> texts;
  const Fd pipe = make_pipe();
  size_t awaited = 0;
  for (const AskedProcess& process : processes) {
    texts.push_back(hindrance(process.pid));
    if (!texts.back().empty()) continue;
    const Question question{owner_of(pipe), static_cast<uint32_t>(texts.size() - 1)};
    const Fd to = pipe.valid() ? open_pipe(process) : Fd();
    if (to.valid() && ::write(to.get(), &question, sizeof(question)) == sizeof(question)) {
      ++awaited;
    } else {
      texts.back() = "cannot be asked where it is";
    }
  }
  const Deadline deadline = Deadline::after(kAskingTime);
  while (awaited > 0 && !deadline.passed()) {
    pollfd readable{pipe.get(), POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now());
    // The deadline may have passed since, and a negative time would be for ever.
    const int patience = std::max(0, static_cast<int>(left.count()) + 1);
    if (::poll(&readable, 1, patience) <= 0) continue;
    Answer answer{};
    if (::read(pipe.get(), &answer, sizeof(answer)) != sizeof(answer)) break;
    if (answer.number >= texts.size()) continue;
    texts[answer.number] = {answer.text, ::strnlen(answer.text, sizeof(answer.text))};
    --awaited;
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) texts[i] = silence(processes[i].pid);
  }
  return texts;
}

}  // namespace ours
