#include "collectives/messages/inbox.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "common/error.h"

namespace ours {

void Inbox::add(std::shared_ptr<Message> receive) {
  for (size_t rank = 0; rank < sources_.size(); ++rank) {
    const auto from = static_cast<int>(rank);
    if ((receive->peer == from || receive->peer == kAnySource) && take_early(receive, from)) return;
  }
  receives_.push_back(std::move(receive));
}

bool Inbox::take_early(const std::shared_ptr<Message>& receive, int from) {
  Source& in = source(from);
  const auto found = std::find_if(in.early.begin(), in.early.end(),
                                  [&](const Early& one) { return one.header.tag == receive->tag && !one.receive; });
  if (found == in.early.end()) return false;
  check_fits(*receive, found->header, from);
  receive->peer = from;
  if (in.arriving && !in.receive && std::next(found) == in.early.end()) {
    found->receive = receive;
  } else {
    deliver(*found, receive);
    in.early.erase(found);
  }
  return true;
}

bool Inbox::begin(int from, const MessageHeader& header, bool always) {
  std::shared_ptr<Message> receive = match(from, header.tag);
  if (!receive && !always && !expects(from)) return false;
  Source& in = source(from);
  if (receive) {
    // The receive has left receives_ but is kept here: if check_fits() throws, the whole group fails, and this
    // receive with it.
    in.receive = receive;
    check_fits(*receive, header, from);
    receive->peer = from;
  } else {
    Early early{header, nullptr, nullptr};
    early.bytes = room_for(header, from);
    in.early.push_back(std::move(early));
  }
  in.arriving = true;
  return true;
}

std::byte* Inbox::place(int from) const {
  const Source& in = source(from);
  return in.receive ? in.receive->data : in.early.back().bytes.get();
}

void Inbox::complete(int from) {
  Source& in = source(from);
  in.arriving = false;
  if (in.receive) {
    ended_.push_back(std::exchange(in.receive, nullptr));
  } else if (in.early.back().receive) {
    deliver(in.early.back(), in.early.back().receive);
    in.early.pop_back();
  }
}

void Inbox::deliver(const Early& early, std::shared_ptr<Message> receive) {
  if (early.header.bytes != 0) std::memcpy(receive->data, early.bytes.get(), early.header.bytes);
  ended_.push_back(std::move(receive));
}

bool Inbox::collect(Messages& ended) {
  if (ended_.empty()) return false;
  std::move(ended_.begin(), ended_.end(), std::back_inserter(ended));
  ended_.clear();
  return true;
}

Messages Inbox::posted() const {
  Messages posted(receives_.begin(), receives_.end());
  for (const Source& in : sources_) {
    if (in.receive) posted.push_back(in.receive);
    for (const Early& early : in.early) {
      if (early.receive) posted.push_back(early.receive);
    }
  }
  return posted;
}

void Inbox::clear() {
  receives_.clear();
  for (Source& in : sources_) in = Source();
}

bool Inbox::empty() const {
  const auto waits = [](const Source& in) {
    return in.receive ||
           std::any_of(in.early.begin(), in.early.end(), [](const Early& one) { return one.receive != nullptr; });
  };
  return receives_.empty() && ended_.empty() && std::none_of(sources_.begin(), sources_.end(), waits);
}

std::shared_ptr<Message> Inbox::match(int from, int tag) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& one) {
    return one->tag == tag && (one->peer == from || one->peer == kAnySource);
  });
  if (found == receives_.end()) return nullptr;
  std::shared_ptr<Message> receive = std::move(*found);
  receives_.erase(found);
  return receive;
}

bool Inbox::expects(int from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [from](const auto& one) { return one->peer == from || one->peer == kAnySource; });
}

Inbox::Room Inbox::room_for(const MessageHeader& header, int from) const {
  if (header.bytes == 0) return nullptr;
  Room room(new (std::nothrow) std::byte[header.bytes]);
  if (room) return room;
  throw Error(describe_(rank_) + " has no memory for a message of " + std::to_string(header.bytes) + " bytes that " +
              describe_(from) + " sent with tag " + std::to_string(header.tag) +
              ", for which no receive is posted yet. Post the receive before those of later messages");
}

void Inbox::check_fits(const Message& receive, const MessageHeader& header, int from) const {
  if (receive.bytes == header.bytes && static_cast<uint32_t>(receive.dtype) == header.dtype) return;
  const auto sent = static_cast<DType>(header.dtype);
  throw MismatchError(describe_(rank_) + " posted " + receive.describe() + ", but " + describe_(from) + " sent " +
                      std::to_string(header.bytes / std::max<size_t>(size_of(sent), 1)) + " x " + name_of(sent) +
                      ". Make size and dtype of the two tensors agree");
}

}  // namespace ours
