#include "common/whereabouts.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "common/deadline.h"
#include "common/fd.h"
#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

/// Sets the description for the time of a test.
class Described {
 public:
  explicit Described(std::string (*describe)()) { set_whereabouts(describe); }
  ~Described() { set_whereabouts(nullptr); }
};

/// A process of its own that can be asked, and is killed at the end.
class Child {
 public:
  Child() {
    int ends[2];
    CHECK_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const Fd from(ends[0]);
    Fd to(ends[1]);
    pid_ = ::fork();
    if (pid_ == 0) {
      const AskedProcess self = own_whereabouts();
      if (::write(to.get(), &self, sizeof(self)) != sizeof(self)) ::_exit(1);
      while (true) ::pause();
    }
    to.reset();
    CHECK_EQ(::read(from.get(), &asked_, sizeof(asked_)), static_cast<ssize_t>(sizeof(asked_)));
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  const AskedProcess& asked() const { return asked_; }
  void signal(int number, int wait_for) const {
    ::kill(pid_, number);
    ::waitpid(pid_, nullptr, wait_for);
  }

 private:
  pid_t pid_ = 0;
  AskedProcess asked_;
};

std::string ask(const AskedProcess& process) { return ask_whereabouts({process}).at(0); }

TEST(processes_are_asked_where_they_are_and_answer_in_order) {
  const Described described([] { return "is process " + std::to_string(::getpid()); });
  const Child a, b;
  const AskedProcess self = own_whereabouts();
  const auto expected = [](pid_t pid) { return "is process " + std::to_string(pid); };
  const std::vector<std::string> texts = ask_whereabouts({b.asked(), self, a.asked()});
  CHECK(texts == (std::vector<std::string>{expected(b.pid()), expected(::getpid()), expected(a.pid())}));
}

TEST(a_forked_child_is_asked_for_itself) {
  const AskedProcess parent = own_whereabouts();
  const Child child;
  CHECK(child.asked().pid != parent.pid && child.asked().inode != parent.inode);
  CHECK_EQ(own_whereabouts().inode, parent.inode);
}

#ifndef __SANITIZE_THREAD__  // it takes the child's thread for that of its parent at the same address, and ends it
TEST(a_process_can_be_forked_while_another_thread_makes_it_known) {
  CHECK(can_fork_during([] { return own_whereabouts().fd >= 0; }));
}
#endif

TEST(a_process_that_is_stopped_or_has_ended_does_not_delay_the_answers) {
  const Child stopped, dead;
  stopped.signal(SIGSTOP, WUNTRACED);
  const auto began = Clock::now();
  CHECK_CONTAINS(ask(stopped.asked()), "is stopped (SIGSTOP");
  // Reaped by then, so that the number may be that of another process, or of none.
  dead.signal(SIGKILL, 0);
  CHECK_EQ(ask(dead.asked()), std::string("cannot be asked where it is"));
  CHECK(Clock::now() - began < kAskingTime);
}

TEST(a_process_that_keeps_silent_is_left_after_a_while) {
  const Described described([]() -> std::string {
    std::this_thread::sleep_for(2 * kAskingTime);
    return "is late";
  });
  const Child silent;
  CHECK_CONTAINS(ask(silent.asked()), "did not say within 300 ms where it is");
}

TEST(a_text_is_cut_to_what_an_answer_holds) {
  const Described described([] { return std::string(5000, 'x'); });
  CHECK_EQ(ask(own_whereabouts()), std::string(1019, 'x'));
}

TEST(only_the_pipe_of_the_process_is_written_to) {
  // Another process may have got the number, or this one may have opened something else since.
  AskedProcess other = own_whereabouts();
  ++other.inode;
  CHECK_EQ(ask(other), std::string("cannot be asked where it is"));
  CHECK_EQ(ask(AskedProcess{::getpid(), -1, 0}), std::string("cannot be asked where it is"));
}

}  // namespace
}  // namespace ours::testing
