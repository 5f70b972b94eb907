#include <algorithm>
#include <condition_variable>
#include <functional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/errors.h"
#include "backend/interruptible.h"
#include "backend/joining/store_keys.h"
#include "backend/process_group.h"
#include "collectives/call_number.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "common/listed.h"
#include "common/own_name.h"

// What callbacks start. It cannot be numbered with what the program calls, because which of the two comes first depends
// on when the future was complete. So it goes through a lane: connections of its own, used in the order in which the
// callbacks were attached. Callbacks on the futures of another group have another lane here, since nothing says which
// of the two groups' callbacks come first.

namespace ours {

namespace {

using Milliseconds = std::chrono::milliseconds;

/// How much longer the other ranks wait than rank 0, which knows who is missing and whose error all ranks should throw.
constexpr Milliseconds kGrace{500};

/// The messages that have not ended, each from or to another rank.
class PendingMessages {
 public:
  void add(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranks_.push_back(rank);
  }

  void end(int rank, const std::exception_ptr& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranks_.erase(std::find(ranks_.begin(), ranks_.end(), rank));
    if (error && !error_) error_ = error;
    ended_.notify_all();
  }

  /// Returns the ranks whose messages have not ended by the deadline. Throws the error of a message that has failed.
  std::vector<int> late(Deadline deadline, int self) {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::string interrupt =
        await_interruptibly(ended_, lock, deadline, [this] { return ranks_.empty() || error_; });
    if (!interrupt.empty()) {
      throw Error(describe_interrupt(describe_own(self), interrupt,
                                     "while it waited for its peers to start what a callback of its own had started"));
    }
    if (error_) std::rethrow_exception(error_);
    return ranks_;
  }

  uint64_t contents = 0;  ///< the contents of the messages, which do not matter

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<int> ranks_;    // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_
};

/// Brings together all ranks that open a lane, by messages of the group, which report deaths and failures at once and
/// make progress even if no thread waits for them. Rank 0 receives from all ranks, and answers.
class Gathering {
 public:
  Gathering(PointToPoint& messages, int tag, Milliseconds timeout)
      : messages_(messages), tag_(tag), timeout_(timeout + kSlack) {}

  void send(int rank) {
    messages_.send({&pending_->contents, sizeof(pending_->contents)}, DType::Int64, rank, tag_, limit(), done(rank));
  }
  void recv(int rank) {
    messages_.recv({&pending_->contents, sizeof(pending_->contents)}, DType::Int64, rank, tag_, limit(), done(rank));
  }
  std::vector<int> late(Deadline deadline, int self) { return pending_->late(deadline, self); }

 private:
  /// The messages' own timeout comes later than any wait for them, since its error would not say what they are for.
  static constexpr Milliseconds kSlack{10000};

  /// The limit has started already, so that a peer that leaves is noticed.
  TransferLimitPtr limit() const {
    auto limit = std::make_shared<TransferLimit>(timeout_);
    limit->start();
    return limit;
  }

  TransferDone done(int rank) {
    pending_->add(rank);
    return [pending = pending_, rank](const Transfer& transfer) {
      pending->end(rank, transfer.error());
      return TransferCallbacks();
    };
  }

  PointToPoint& messages_;
  const int tag_;
  const Milliseconds timeout_;
  const std::shared_ptr<PendingMessages> pending_ = std::make_shared<PendingMessages>();
};

/// A negative tag, which programs cannot use.
int tag_of(const std::string& lane) { return -1 - static_cast<int>(std::hash<std::string>()(lane) & 0x3FFFFFFF); }

void bring_together(const Group& group, PointToPoint& messages, int tag, const std::string& what,
                    Milliseconds timeout) {
  const auto check = [&](Gathering& step, Milliseconds limit, const std::string& whose) {
    std::vector<int> late = step.late(Deadline::after(limit), group.rank());
    if (late.empty()) return;
    std::sort(late.begin(), late.end());
    throw TimeoutError((whose.empty() ? (late.size() == 1 ? "rank " : "ranks ") + listed(late) : whose) +
                       " did not start " + what + " within " + std::to_string(timeout.count()) +
                       " ms. Callbacks must start the same collectives on all ranks");
  };
  if (group.rank() == 0) {
    Gathering arrivals(messages, tag, timeout);
    for (int rank = 1; rank < group.size(); ++rank) arrivals.recv(rank);
    check(arrivals, timeout, "");
    Gathering answers(messages, tag, timeout);
    for (int rank = 1; rank < group.size(); ++rank) answers.send(rank);
    check(answers, timeout, "");
  } else {
    Gathering here(messages, tag, timeout);
    here.send(0);
    here.recv(0);
    check(here, timeout + kGrace, "some rank");
  }
}

}  // namespace

ProcessGroupOurs::ProcessGroupOurs(StorePtr store, const ProcessGroupOurs& whole, Milliseconds timeout)
    : Backend(whole.rank_, whole.size_),
      store_(std::move(store)),
      options_(whole.options_),
      status_(whole.status_),
      queue_(std::make_shared<CommQueue>(ours::options().comm_thread_affinity, ours::options().comm_nice)),
      inline_calls_(whole.inline_calls_) {
  setGroupDesc(whole.getGroupDesc());
  connect(timeout);
}

ProcessGroupOurs& ProcessGroupOurs::lane_of(const Callback& callback, Op op, Milliseconds timeout) {
  callback.await_turn(timeout);
  const std::string name = callback.origin().order->name_for(*status_->callbacks);
  std::shared_ptr<Lane> lane;
  {
    const std::lock_guard<std::mutex> lock(lanes_mutex_);
    std::shared_ptr<Lane>& found = lanes_[name];
    if (!found) found = std::make_shared<Lane>();
    lane = found;
  }
  const std::lock_guard<std::mutex> opening(lane->opening);
  if (!lane->group) {  // only changed by the thread that holds `opening`
    const uint64_t number = status_->number_in_callback(callback.origin(), 1);
    auto group = open_lane(name, std::string(name_of(op)) + ' ' + describe_number(number), timeout);
    {
      const std::lock_guard<std::mutex> lock(lanes_mutex_);
      lane->group = std::move(group);
    }
    // abort() ends the group first, and then the lanes that it finds.
    if (const std::string why = group_->failure(); !why.empty()) lane->group->parts().abort(why);
  }
  // The group may have been shut down meanwhile.
  status_->check_usable();
  return *lane->group;
}

c10::intrusive_ptr<ProcessGroupOurs> ProcessGroupOurs::open_lane(const std::string& name, const std::string& what,
                                                                 Milliseconds timeout) {
  try {
    bring_together(*group_, *point_to_point_, tag_of(name), what, timeout);
    // A connection of its own, since the rendezvous waits, and other threads may use the group's store meanwhile.
    auto store =
        c10::make_intrusive<c10d::PrefixStore>("callbacks " + name, connect_anew(store_, Deadline::after(timeout)));
    return c10::make_intrusive<ProcessGroupOurs>(std::move(store), *this, timeout);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    group_->fail(error);
    const std::exception_ptr told = status_->note_error(error);
    throw_interrupt();
    std::rethrow_exception(told);
  }
}

std::vector<c10::intrusive_ptr<ProcessGroupOurs>> ProcessGroupOurs::lanes() {
  std::vector<c10::intrusive_ptr<ProcessGroupOurs>> open;
  const std::lock_guard<std::mutex> lock(lanes_mutex_);
  for (const auto& [name, lane] : lanes_) {
    if (lane->group) open.push_back(lane->group);
  }
  return open;
}

void ProcessGroupOurs::abort_all(const char* reason) {
  parts().abort(reason);
  for (const auto& lane : lanes()) lane->parts().abort(reason);
}

std::vector<GroupParts> ProcessGroupOurs::all_parts() {
  std::vector<GroupParts> all;
  for (const auto& lane : lanes()) all.push_back(lane->parts());
  all.push_back(parts());
  return all;
}

}  // namespace ours
