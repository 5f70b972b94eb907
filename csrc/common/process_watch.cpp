#include "common/process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "common/descriptors.h"
#include "common/process_wide.h"

namespace ours {

namespace {

/// Whether no process has this number any more. This needs no descriptor, but a zombie still has its number.
bool is_gone(pid_t pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }

/// Whether /proc/<pid>/stat, which belongs to the process and not to its number, says that it has ended.
bool ended_by_stat(int fd, pid_t pid) {
  char text[512];
  const ssize_t length = ::pread(fd, text, sizeof(text), 0);
  if (length <= 0) return (length < 0 && errno == ESRCH) || is_gone(pid);
  // The name may contain blanks and parentheses; the state is the letter after the last parenthesis.
  const std::string line(text, static_cast<size_t>(length));
  const auto close = line.rfind(')');
  if (close == std::string::npos || close + 2 >= line.size()) return false;
  const char state = line[close + 2];
  return state == 'Z' || state == 'X';
}

}  // namespace

/// A process, shared by all watches of it.
class ProcessWatch::Watched {
 public:
  explicit Watched(pid_t pid) : pid_(pid) {
#ifdef SYS_pidfd_open
    pidfd_ = Fd(with_descriptors([&] { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }));
    // NOLINTNEXTLINE(clang-analyzer-unix.Errno): the call has failed.
    ended_at_start_ = !pidfd_.valid() && errno == ESRCH;
#endif
    if (!pidfd_.valid() && !ended_at_start_) {
      // Kept open, so that neither a lack of descriptors nor a new process with the same number can mislead.
      const std::string path = "/proc/" + std::to_string(pid) + "/stat";
      stat_ = Fd(with_descriptors([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
    }
    start_ = start_of(pid);  // read last: if it is that of a later process, the one that is held has ended
  }

  /// What start_of() says of it.
  uint64_t start() const { return start_; }

  bool ended() const {
    if (ended_at_start_) return true;
    if (pidfd_.valid()) {
      pollfd poll_me{pidfd_.get(), POLLIN, 0};
      return ::poll(&poll_me, 1, 0) > 0 && (poll_me.revents & POLLIN) != 0;
    }
    return stat_.valid() ? ended_by_stat(stat_.get(), pid_) : is_gone(pid_);
  }

  /// Whether a descriptor tells it from a later process with its number.
  bool is_held() const { return pidfd_.valid() || stat_.valid(); }

  static std::shared_ptr<Watched> of(pid_t pid);

 private:
  struct Registry;

  const pid_t pid_;
  Fd pidfd_;  // invalid if the kernel has no pidfd_open, or no descriptor was left
  Fd stat_;   // used if there is no pidfd
  bool ended_at_start_ = false;
  uint64_t start_ = 0;
};

struct ProcessWatch::Watched::Registry {
  std::map<pid_t, std::weak_ptr<Watched>> by_pid;

  void in_child() {}
};

std::shared_ptr<ProcessWatch::Watched> ProcessWatch::Watched::of(pid_t pid) {
  auto& all = ProcessWide<Registry>::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& by_pid = all.value.by_pid;
  std::shared_ptr<Watched> known = by_pid[pid].lock();
  // One that has ended or is not held may have left its number to another process.
  if (known && known->is_held() && !known->ended()) return known;
  by_pid[pid] = known = std::make_shared<Watched>(pid);
  for (auto one = by_pid.begin(); one != by_pid.end();) {
    one = one->second.expired() ? by_pid.erase(one) : std::next(one);
  }
  return known;
}

uint64_t start_of(pid_t pid) {
  constexpr int kFieldsBefore = 19;  // between the name and the start
  std::string line;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), line);
  const size_t name_ends = line.rfind(')');
  std::istringstream fields(name_ends == std::string::npos ? "" : line.substr(name_ends + 1));
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  uint64_t start = 0;
  fields >> start;
  return start;
}

ProcessWatch::ProcessWatch(pid_t pid, uint64_t start)
    : watched_(Watched::of(pid)), replaced_(start != 0 && watched_->start() != 0 && watched_->start() != start) {}

bool ProcessWatch::ended() const { return replaced_ || (watched_ && watched_->ended()); }

}  // namespace ours
