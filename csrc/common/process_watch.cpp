#include "common/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

namespace ours {

namespace {

bool ended_by_proc(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return true;
  // The name may hold blanks and parentheses; the state is the letter after the last one.
  const auto close = text.rfind(')');
  if (close == std::string::npos || close + 2 >= text.size()) return false;
  const char state = text[close + 2];
  return state == 'Z' || state == 'X';
}

}  // namespace

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid) {
#ifdef SYS_pidfd_open
  pidfd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd_.valid() && errno == ESRCH) ended_at_start_ = true;
#endif
}

bool ProcessWatch::ended() const {
  if (pid_ == 0) return false;
  if (ended_at_start_) return true;
  if (!pidfd_.valid()) return ended_by_proc(pid_);
  pollfd poll_me{pidfd_.get(), POLLIN, 0};
  return ::poll(&poll_me, 1, 0) > 0 && (poll_me.revents & POLLIN) != 0;
}

}  // namespace ours
