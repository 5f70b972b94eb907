#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "collectives/messages/message.h"

namespace ours {

/// Matches the messages that arrive at one rank with its receives, and says where their bytes belong. A message is
/// taken in once a receive is posted for it, or for another message of the same sender; in the latter case it is set
/// aside in memory, so that tags may be received in any order. Not thread-safe.
class Inbox {
 public:
  /// `describe` names a rank in error messages.
  Inbox(int rank, int size, std::function<std::string(int)> describe)
      : rank_(rank), describe_(std::move(describe)), sources_(static_cast<size_t>(size)) {}

  /// Serves the receive from what was set aside, or keeps it until its message comes. Throws MismatchError if the
  /// message does not fit it.
  void add(std::shared_ptr<Message> receive);

  /// Says that a message of `from` comes next. Returns false if it is not to be taken in yet; otherwise its bytes go
  /// to place(from), and complete(from) follows. `always`: take it in even if no receive waits for that sender.
  /// Throws MismatchError if the message does not fit the receive that it matches, and Error if it is to be set aside
  /// and there is no memory for it.
  bool begin(int from, const MessageHeader& header, bool always = false);
  bool is_arriving(int from) const { return source(from).arriving; }
  std::byte* place(int from) const;
  void complete(int from);

  /// Appends the receives that have their message to `ended`. Returns false if there are none.
  bool collect(Messages& ended);
  /// The receives that still wait for a message.
  Messages posted() const;
  /// Drops all receives but those that collect() gives. From then on no message is arriving.
  void clear();
  bool empty() const;

 private:
  /// Memory that has not been written to, and that the system provides only as bytes arrive: what a header promises may
  /// never come.
  using Room = std::unique_ptr<std::byte[]>;

  /// A message that was set aside, whole or still arriving.
  struct Early {
    MessageHeader header;
    Room bytes;
    std::shared_ptr<Message> receive;  ///< one that was posted while it was arriving
  };
  struct Source {
    bool arriving = false;
    std::shared_ptr<Message> receive;  ///< where the message goes; null: to the back of `early`
    std::list<Early> early;            ///< mostly empty, and a deque takes memory then
  };

  const Source& source(int rank) const { return sources_[static_cast<size_t>(rank)]; }
  Source& source(int rank) { return sources_[static_cast<size_t>(rank)]; }
  /// Takes out the first receive that matches; null if there is none.
  std::shared_ptr<Message> match(int from, int tag);
  bool expects(int from) const;
  bool take_early(const std::shared_ptr<Message>& receive, int from);
  void deliver(const Early& early, std::shared_ptr<Message> receive);
  Room room_for(const MessageHeader& header, int from) const;
  void check_fits(const Message& receive, const MessageHeader& header, int from) const;

  const int rank_;
  const std::function<std::string(int)> describe_;
  std::list<std::shared_ptr<Message>> receives_;  ///< that wait for a message to begin, in the order posted
  std::vector<Source> sources_;                   ///< by rank
  Messages ended_;
};

}  // namespace ours
