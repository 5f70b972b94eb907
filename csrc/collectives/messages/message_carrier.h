#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "collectives/messages/message.h"
#include "common/error.h"
#include "transport/failure_kind.h"

namespace ours {

/// A peer left the group in an orderly way, which ends only the messages that wait for it.
class PeerLeftError : public PeerError {
 public:
  using PeerError::PeerError;
};

/// The ranks from which a message could come, or to which it goes, that have left.
struct Absent {
  int ranks = 0;
  std::string last;  ///< what became of the last of them, as a sentence

  /// Throws PeerLeftError if no rank is left for `message`, in a group of `size` ranks: a receive from any source can
  /// go on until the last peer has left.
  void check(const Message& message, int size) const {
    if (ranks > 0 && ranks == (message.peer == kAnySource ? size - 1 : 1)) throw PeerLeftError(last);
  }
};

/// What the thread that moves messages does otherwise.
enum class Mover {
  Goes,   ///< it has just posted one, and goes on
  Waits,  ///< it waits for one
  Other   ///< nothing, so that the program's threads need not
};

/// Moves the messages of one rank to the others. It has no thread, and waits in reach() and rest() only.
class MessageCarrier {
 public:
  virtual ~MessageCarrier() = default;

  virtual int size() const = 0;
  virtual std::string describe_self() const = 0;
  /// Says where a rank of the group, for which a message waits, is in its program (see roll_call()); empty if that
  /// cannot be found out.
  virtual std::string call_roll(int /*rank*/) const { return ""; }

  // ---- by one thread at a time

  virtual void add(const std::shared_ptr<Message>& message) = 0;

  /// Moves everything as far as possible and appends the messages that ended to `ended`; the caller must finish() them.
  /// For a mover that goes on, it may leave a message that has not begun to another thread, for which it rings.
  /// Returns whether anything moved. Throws the error that fails the group, such as MismatchError where a message does
  /// not fit the receive that it matches.
  virtual bool progress(Messages& ended, Mover mover) = 0;

  /// Takes out all messages; their memory is not touched any more.
  virtual Messages take_all() = 0;

  /// All messages that are posted and have not ended.
  virtual Messages posted() const = 0;
  virtual bool empty() const = 0;

  /// Throws PeerError if `message` can never end because a rank is gone; PeerLeftError if that rank left.
  virtual void check_can_complete(const Message& message) = 0;

  // ---- from any thread

  /// Makes the connection that the message needs before it is added; waits until the peer can be reached.
  virtual void reach(const Message& /*message*/) {}

  /// Throws the failure of the group, if there is one.
  virtual void check() = 0;
  virtual bool failed() const = 0;
  virtual void fail(FailureKind kind, const std::string& message) noexcept = 0;
  /// Fails the group with that error, keeping its kind.
  virtual void fail(const std::exception_ptr& error) noexcept = 0;

  /// A number that changes whenever this rank may have something to do.
  virtual uint32_t heard() const = 0;
  /// Changes heard(), and ends the rests of this process's threads.
  virtual void ring() = 0;
  /// Sleeps until ready() holds, which follows from a change of heard(), or until there may be something to move.
  /// Returns true if it slept so long that it is time to look for ranks that are gone. ready() may take locks.
  virtual bool rest(const std::function<bool()>& ready) = 0;

  /// True in a forked child of the process that joined the group.
  virtual bool in_child() const = 0;
  /// Says that there will be no more messages.
  virtual void leave() noexcept = 0;
};

}  // namespace ours
