#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ours {

class CallbackOrder;

/// Whose callbacks a future has: in whose order they stand, and on which collective of that group the future is, or the
/// one whose callbacks led to it.
struct Origin {
  std::shared_ptr<CallbackOrder> order;
  uint64_t number = 0;
};

/// One callback on the future of a collective, from when it is attached until it has returned.
///
/// What callbacks do to each other must not depend on when a collective ends: whether a callback runs at once, where it
/// is attached to a future that is complete, or later on another thread. So those of one group stand in the order that
/// they have where all run at once, and a callback communicates only when all before it have returned.
class Callback {
 public:
  /// At the attachment, on the thread that attaches it.
  explicit Callback(const Origin& origin);
  /// It was dropped, if it has not returned.
  ~Callback() { leave(); }
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  /// The one that the calling thread is in; null outside.
  static Callback* current() { return place(); }

  /// While it lasts, the thread is in that callback, which has returned then.
  class Running {
   public:
    explicit Running(Callback& callback) : callback_(callback), before_(place()) { place() = &callback; }
    ~Running() {
      place() = before_;
      callback_.leave();
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    Callback& callback_;
    Callback* const before_;
  };

  /// While it lasts, the thread is in no callback: it does something else in the midst of one.
  class Outside {
   public:
    Outside() : before_(place()) { place() = nullptr; }
    ~Outside() { place() = before_; }
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

   private:
    Callback* const before_;
  };

  /// Whether all callbacks before it have returned.
  bool has_turn() const;
  /// Waits for that. Throws DistBackendError if they do not within `timeout`.
  void await_turn(std::chrono::milliseconds timeout) const;
  /// Runs `body`, which waits for this callback's turn, on a thread of its own: one before it may be run by the calling
  /// thread, further down on its stack. `body` must not throw.
  void hand_over(std::function<void()> body) const;

  /// That of the outermost callback in which this one was attached, otherwise its own.
  const Origin& origin() const { return origin_; }

 private:
  static Callback*& place();
  void leave() noexcept;

  const Origin origin_;
  std::list<const Callback*>::iterator position_;
  bool stands_ = true;
};

/// The callbacks of one group's futures that have not returned, in their order.
class CallbackOrder {
 public:
  /// `ranks`: the global ranks of the group's members; empty: unknown.
  CallbackOrder(std::string group, std::vector<uint64_t> ranks);

  /// What ranks of the group `other` call this one: by its name where all of them are members, otherwise they may have
  /// different groups here, and one name must do for these.
  std::string name_for(const CallbackOrder& other) const;

  /// Waits until what was handed over has ended, or a signal handler has raised; not in a callback. Whether there was
  /// something.
  bool await_handed_over();

 private:
  friend class Callback;

  const std::string group_;
  const std::vector<uint64_t> ranks_;  // sorted
  std::mutex mutex_;
  std::condition_variable returned_;
  std::list<const Callback*> callbacks_;  // guarded by mutex_
  int handed_over_ = 0;                   // guarded by mutex_
};

}  // namespace ours
