#include "transport/tcp/tcp_parking.h"

#include <algorithm>

namespace ours {

namespace {

bool are_quiet(const TcpParking::Streams& streams) {
  return std::all_of(streams.begin(), streams.end(), [](const TcpStream* stream) {
    return stream->is_open() && !stream->ended() && stream->error() == 0 && !stream->has_sends() &&
           !stream->has_receives();
  });
}

ParkNotice notice_of(const TcpParking::Streams& streams, const TcpCard& card) {
  ParkNotice notice;
  for (auto data = streams.begin() + 1; data != streams.end(); ++data) {
    notice.frames.push_back((*data)->sent());
    notice.frames.push_back((*data)->taken());
  }
  notice.card = card;
  return notice;
}

}  // namespace

bool TcpParking::offer(const Streams& streams, const TcpCard& card) {
  if (is_under_way() || !are_quiet(streams)) return false;
  own_ = notice_of(streams, card);
  say(streams, true);
  state_ = State::Offered;
  return true;
}

void TcpParking::hear(const Streams& streams, const ParkNotice& theirs, bool willing, bool idle, const TcpCard& card) {
  if (is_agreed()) return;
  if (!is_under_way()) {
    own_ = notice_of(streams, card);
    willing = willing && idle && are_quiet(streams) && own_.agrees_with(theirs);
    say(streams, willing);
  }
  // If both made offers, each compares the same two notices.
  if (willing && own_.agrees_with(theirs)) {
    state_ = State::Agreed;
  } else {
    go_on(streams);
  }
}

void TcpParking::say(const Streams& streams, bool willing) {
  FrameHeader header;
  header.kind = FrameKind::Park;
  header.detail = willing ? 1 : 0;
  streams.front()->post_send(header, own_.text());
  streams.front()->send_now();
  if (!willing) return;
  for (TcpStream* stream : streams) stream->hold();
}

bool TcpParking::cut_short(const Streams& streams) {
  // What it has agreed to must be heard before the connection ends.
  const bool ends = is_agreed() && streams.front()->sending() == 0;
  ends ? end(streams) : go_on(streams);
  return ends;
}

void TcpParking::go_on(const Streams& streams) {
  state_ = State::None;
  for (TcpStream* stream : streams) stream->release();
}

bool TcpParking::advance(const Streams& streams) {
  TcpStream& control = *streams.front();
  if (state_ == State::Agreed && control.sending() == 0) {
    state_ = State::Ending;
    control.end_sending();
    std::for_each(streams.begin() + 1, streams.end(), [](TcpStream* data) { data->part(); });
  }
  // If the peer dies now, connecting to it again will tell.
  if (!is_agreed() || !control.ended()) return false;
  end(streams);
  return true;
}

void TcpParking::end(const Streams& streams) {
  for (TcpStream* stream : streams) stream->part();
  state_ = State::None;
}

}  // namespace ours
