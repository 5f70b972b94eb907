#include "backend/callback_lanes.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/interruptible.h"
#include "backend/joining/store_keys.h"
#include "collectives/call_number.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "common/listed.h"
#include "common/own_name.h"

namespace ours {

namespace {

using Milliseconds = std::chrono::milliseconds;

/// How much longer the other ranks wait than rank 0, which knows who is missing and whose error all ranks should throw.
constexpr Milliseconds kGrace{500};

/// Messages with which ranks come together that open a lane: those of the group, which report deaths and failures at
/// once and make progress even if no thread waits for them.
class Gathering {
 public:
  Gathering(PointToPoint& messages, int tag, Milliseconds timeout)
      : messages_(messages), tag_(tag), timeout_(timeout + kSlack) {}

  void send(int rank) { messages_.send({&pending_->contents, 1}, DType::UInt8, rank, tag_, limit(), done(rank)); }
  void recv(int rank) { messages_.recv({&pending_->contents, 1}, DType::UInt8, rank, tag_, limit(), done(rank)); }

  /// Returns the ranks whose messages have not ended by the deadline. Throws the error of a message that has failed.
  std::vector<int> late(Deadline deadline, int self) {
    Pending& pending = *pending_;
    messages_.attend();
    std::unique_lock<std::mutex> lock(pending.mutex);
    const std::string interrupt =
        await_interruptibly(pending.ended, lock, deadline, [&] { return pending.ranks.empty() || pending.error; });
    if (!interrupt.empty()) {
      throw Error(describe_interrupt(describe_own(self), interrupt,
                                     "while it waited for its peers to start the same collective in their callbacks"));
    }
    if (pending.error) std::rethrow_exception(pending.error);
    return pending.ranks;
  }

 private:
  /// The messages' own timeout comes later than any wait for them, since its error would not say what they are for.
  static constexpr Milliseconds kSlack{10000};

  /// The messages that have not ended, which may outlive the wait for them.
  struct Pending {
    char contents = 0;  // which do not matter
    std::mutex mutex;
    std::condition_variable ended;
    std::vector<int> ranks;    // guarded by mutex; each from or to another one
    std::exception_ptr error;  // guarded by mutex
  };

  /// The limit has started already, so that a peer that leaves is noticed.
  TransferLimitPtr limit() const {
    auto limit = std::make_shared<TransferLimit>(timeout_);
    limit->start();
    return limit;
  }

  TransferDone done(int rank) {
    const std::lock_guard<std::mutex> lock(pending_->mutex);
    pending_->ranks.push_back(rank);
    return [pending = pending_, rank](const Transfer& transfer) {
      const std::lock_guard<std::mutex> ending(pending->mutex);
      pending->ranks.erase(std::find(pending->ranks.begin(), pending->ranks.end(), rank));
      if (!pending->error) pending->error = transfer.error();
      pending->ended.notify_all();
      return TransferCallbacks();
    };
  }

  PointToPoint& messages_;
  const int tag_;
  const Milliseconds timeout_;
  const std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
};

/// A negative tag, which programs cannot use.
int tag_of(const std::string& lane) { return -1 - static_cast<int>(std::hash<std::string>()(lane) & 0x3FFFFFFF); }

/// Rank 0 receives from all ranks, and answers.
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

Lane& CallbackLanes::lane_of(const Callback& callback, Op op, Milliseconds timeout) {
  callback.await_turn(timeout);
  const GroupStatus& status = *whole_->status;
  const std::string name = callback.origin().order->name_for(*status.callbacks);
  std::shared_ptr<Place> place;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Place>& found = places_[name];
    if (!found) found = std::make_shared<Place>();
    place = found;
  }
  const std::lock_guard<std::mutex> opening(place->opening);
  if (!place->lane) {  // only changed by the thread that holds `opening`
    const uint64_t number = status.number_in_callback(callback.origin(), 1);
    auto lane = open(name, std::string(name_of(op)) + ' ' + describe_number(number), timeout);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place->lane = std::move(lane);
    }
    // abort() ends the group first, and then the lanes that it finds.
    if (const std::string why = whole_->group->failure(); !why.empty()) place->lane->abort(why);
  }
  // The group may have been shut down meanwhile.
  status.check_usable();
  return *place->lane;
}

std::shared_ptr<Lane> CallbackLanes::open(const std::string& name, const std::string& what,
                                          Milliseconds timeout) const {
  try {
    bring_together(*whole_->group, *whole_->messages, tag_of(name), what, timeout);
    Meeting meeting = meeting_;
    // A connection of its own, since the rendezvous waits, and other threads may use the group's store meanwhile.
    meeting.store = c10::make_intrusive<c10d::PrefixStore>("callbacks " + name,
                                                           connect_anew(meeting_.store, Deadline::after(timeout)));
    meeting.timeout = timeout;
    return Lane::open(meeting, whole_->status);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    whole_->group->fail(error);
    const std::exception_ptr told = whole_->status->note_error(error);
    throw_interrupt();
    std::rethrow_exception(told);
  }
}

std::vector<std::shared_ptr<Lane>> CallbackLanes::all() const {
  std::vector<std::shared_ptr<Lane>> open;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, place] : places_) {
    if (place->lane) open.push_back(place->lane);
  }
  return open;
}

}  // namespace ours
