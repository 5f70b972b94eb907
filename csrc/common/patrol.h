#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "common/deadline.h"

namespace ours {

/// Lets background threads see to what has been left behind without being woken for it: to wake a thread takes longer
/// than many things that somebody else comes for soon. While there are such things, and for a while afterwards, one
/// sleeping thread looks at them from time to time. All functions need the mutex that guards the things.
class Patrol {
 public:
  /// How long a thing lies at most until a thread sees to it, unless it is urgent.
  static constexpr std::chrono::milliseconds kEvery{10};

  /// Notes that something has been left, which a thread is to see to `within` that time. `lay`: so had other things
  /// been. Returns whether a thread will look at it; otherwise the caller has to wake or start one, which then calls
  /// sleep().
  bool leave(std::chrono::microseconds within = kEvery, bool lay = false) {
    left_at_ = Clock::now();
    due_at_ = lay ? std::min(due_at_, left_at_ + within) : left_at_ + within;
    every_ = within;
    going_round_ = true;
    left_since_look_ = true;
    return looking_ && looks_at_ <= due_at_;
  }

  /// Whether somebody else had come for what was left when the thread last looked for something.
  bool looks_in_vain() const { return in_vain_; }
  /// Notes that somebody else comes for what was left. If it has lain for `long_enough`, looking is worth it.
  void note_coming(std::chrono::microseconds long_enough) {
    if (Clock::now() - left_at_ >= long_enough) in_vain_ = left_since_look_ = false;
  }

  /// Makes what has been left due. The caller wakes a thread.
  void hurry() { due_at_ = {}; }
  bool is_due() const { return Clock::now() >= due_at_; }

  /// Sleeps on `wake` until ready(), which is called when `wake` is notified and, on one of the threads, from time to
  /// time. `something_left` says whether there is anything to see to.
  template <class Ready, class SomethingLeft>
  void sleep(std::condition_variable& wake, std::unique_lock<std::mutex>& lock, Ready&& ready,
             SomethingLeft&& something_left) {
    while (!ready()) {
      if (!going_round_ || looking_) {
        wake.wait(lock);
        continue;
      }
      looking_ = true;
      looks_at_ = something_left() ? due_at_ : Clock::now() + every_;
      if (wake.wait_until(lock, looks_at_) == std::cv_status::timeout && left_since_look_) {
        in_vain_ = !ready();
        left_since_look_ = something_left();
      }
      looking_ = false;
      going_round_ = something_left() || Clock::now() - left_at_ < kRounds * every_;
    }
    left_since_look_ = false;  // the thread sees to it
  }

 private:
  static constexpr int kRounds = 100;  ///< that a thread goes after the last thing was left

  Clock::time_point left_at_{};
  Clock::time_point due_at_{};
  Clock::time_point looks_at_{};  ///< when the thread that is looking will have slept
  std::chrono::microseconds every_{kEvery};
  bool going_round_ = false;
  bool looking_ = false;  ///< a thread sleeps until it is time to look
  bool left_since_look_ = false;
  bool in_vain_ = false;
};

}  // namespace ours
