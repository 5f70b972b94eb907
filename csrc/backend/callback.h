#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ours {

class CallbackOrder;

/// The group and the collective whose future callbacks are attached to. A callback that is attached inside another one
/// has the origin of the outermost one.
struct Origin {
  std::shared_ptr<CallbackOrder> order;
  uint64_t number = 0;
};

/// A callback on the future of a collective, from when it is attached until it has returned.
///
/// A callback runs immediately if its future is already complete, and otherwise later, on another thread. To make the
/// order of the collectives in callbacks the same on all ranks, callbacks are kept in the order in which they would run
/// if every future were already complete, and each one communicates only once all before it have returned.
class Callback {
 public:
  /// Called when the callback is attached, on the thread that attaches it.
  explicit Callback(const Origin& origin);
  /// A callback that is destroyed before it has returned gives up its place.
  ~Callback() { leave(); }
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  /// The callback that the calling thread runs; null if it runs none.
  static Callback* current() { return running(); }

  /// Marks the calling thread as running `callback`, which counts as returned when this object is destroyed; or as
  /// running none (null), when what it does meanwhile is not a callback's doing.
  class Running {
   public:
    explicit Running(Callback* callback) : callback_(callback), before_(std::exchange(running(), callback)) {}
    ~Running() {
      running() = before_;
      if (callback_ != nullptr) callback_->leave();
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    Callback* const callback_;
    Callback* const before_;
  };

  /// Whether all callbacks before it have returned.
  bool has_turn() const;
  /// Waits for its turn. Throws DistBackendError if that does not come within `timeout`.
  void await_turn(std::chrono::milliseconds timeout) const;
  /// Runs `body`, which waits for this callback's turn, on a thread of its own, because an earlier callback may be
  /// further down on the caller's stack. `body` must not throw.
  void hand_over(std::function<void()> body) const;

  /// The origin that it was made with, or that of the outermost callback in which it was attached.
  const Origin& origin() const { return origin_; }

 private:
  static Callback*& running();
  void leave() noexcept;

  const Origin origin_;
  std::list<const Callback*>::iterator position_;
  bool has_place_ = true;
};

/// The callbacks of a group's futures that have not returned, in order.
class CallbackOrder {
 public:
  /// `ranks`: the global ranks of the group's members; empty if unknown.
  CallbackOrder(std::string group, std::vector<uint64_t> ranks);

  /// The name of the lane of group `other` for this order. It contains this group's name only if all ranks of `other`
  /// are members of this group: otherwise they may be in different groups here, and need a name that all of them know.
  std::string name_for(const CallbackOrder& other) const;

  /// Waits until all bodies that were handed over have ended, or a signal handler has raised. Returns at once inside a
  /// callback of this order. Returns whether it had to wait.
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
