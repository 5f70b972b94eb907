#include "transport/tcp/tcp_connections.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/descriptors.h"
#include "common/listed.h"
#include "common/other_failures.h"
#include "transport/tcp/tcp_socket.h"

namespace ours {

namespace {

constexpr std::chrono::milliseconds kHigherRankWaits{20};
/// How long to wait for the last word of a dying rank, which comes on another connection than its data.
constexpr std::chrono::milliseconds kGrace{300};

std::string error_text(const TcpStream& stream) {
  return stream.error() == 0 ? "" : " (" + text_of_error(stream.error()) + ")";
}

}  // namespace

TcpConnections::TcpConnections(const TcpSelf& self, const TcpConfig& config, const GroupFailure& failure,
                               TcpPoller& poller, Owner& owner, TcpCard& card)
    : self_(self),
      card_(card),
      failure_(failure),
      poller_(poller),
      owner_(owner),
      congestion_(config.congestion),
      unanswered_(config.unanswered),
      acceptor_(poller, *this),
      peers_(static_cast<size_t>(self.size)) {
  acceptor_.listen(config, congestion_.at_first(), card);
  card.whereabouts = own_tcp_whereabouts(card.addresses, config.ports);
}

TcpConnections::Peer& TcpConnections::peer(int rank) {
  std::unique_ptr<Peer>& peer = peers_[static_cast<size_t>(rank)];
  if (!peer) {
    peer = std::make_unique<Peer>();
    met_.push_back(rank);
    for (int stream = 0; stream < self_.streams; ++stream) {
      peer->slots.push_back(std::make_unique<Slot>(rank, stream, owner_));
      peer->streams.push_back(&peer->slots.back()->stream);
    }
  }
  return *peer;
}

// --- connecting ------------------------------------------------------------------------------------------------------

bool TcpConnections::is_known(int rank) {
  const Peer& peer = this->peer(rank);
  const auto is_open = [](const TcpStream* stream) { return stream->is_open(); };
  return !peer.addresses.all().empty() || std::all_of(peer.streams.begin(), peer.streams.end(), is_open);
}

void TcpConnections::need(int rank) {
  peer(rank).needed = true;
  begin_missing(rank);
}

void TcpConnections::need(int rank, const TcpCard& card) {
  Peer& peer = this->peer(rank);
  peer.addresses = TcpAddresses(card, card_);
  if (peer.addresses.all().empty()) {
    owner_.raise(FailureKind::Peer, describe(rank) + " can be reached on its own machine only: it published " +
                                        listed(card.addresses, [](const auto& one) { return one.text(); }) +
                                        ". Set OURS_INTERFACE there to the network that leads to the others");
  }
  need(rank);
}

void TcpConnections::begin_missing(int rank) {
  Peer& peer = this->peer(rank);
  if (!peer.needed || peer.left || peer.parking.is_under_way() || peer.addresses.all().empty()) return;
  // Control comes first, so that once there is data, there is a way to say farewell.
  const int end = peer.slots[0]->stream.is_open() && !failure_.failed() ? self_.streams : 1;
  for (int stream = 0; stream < end; ++stream) {
    Slot& slot = *peer.slots[static_cast<size_t>(stream)];
    if (slot.stream.is_open() || slot.attempt || slot.inbound) continue;
    const auto wait = self_.rank > rank ? kHigherRankWaits : Clock::duration::zero();
    slot.attempt = std::make_unique<TcpAttempt>(wait, peer.addresses.first(stream, std::min(self_.rank, rank)));
    attempts_.push_back(&slot);
  }
}

bool TcpConnections::advance_attempts() {
  bool moved = false;
  // By index: an open control connection begins further attempts.
  for (size_t i = 0; i < attempts_.size(); ++i) {
    if (attempts_[i]->attempt) moved = advance_attempt(*attempts_[i]) || moved;
  }
  const auto ended = [](const Slot* slot) { return !slot->attempt; };
  attempts_.erase(std::remove_if(attempts_.begin(), attempts_.end(), ended), attempts_.end());
  return moved;
}

bool TcpConnections::advance_attempt(Slot& slot) {
  TcpAttempt& attempt = *slot.attempt;
  if (attempt.is_due() && !begin_attempt(slot)) return true;
  const auto state = attempt.advance(peer(slot.rank).addresses.all().size() > 1);
  if (state == TcpHandshake::State::Going) return false;
  if (state == TcpHandshake::State::Broken) {
    try_next(slot, attempt.reason(), attempt.refused());
    return true;
  }
  TcpHandshake done = attempt.take();
  slot.attempt.reset();
  open(slot, done);
  return true;
}

bool TcpConnections::begin_attempt(Slot& slot) {
  const Peer& peer = this->peer(slot.rank);
  ProcessFd fd = begin_connecting(peer.addresses.all()[slot.attempt->address()], congestion_.at_first());
  if (!fd.valid()) {
    const int error = errno;
    const bool is_lack = is_lack_of_descriptors(error) && !failure_.failed();
    // Where it makes room, the next round of addresses finds it.
    if (is_lack) lacks_descriptors("connect to " + describe(slot.rank), error);
    try_next(slot, text_of_error(error), error == ECONNREFUSED);
    return false;
  }
  tune_connection(fd.get());
  const int number = fd.get();
  slot.attempt->begin(TcpHandshake(std::move(fd), self_, slot.rank, peer.addresses.mesh(), slot.number));
  poller_.watch_handshake(number);
  return true;
}

void TcpConnections::try_next(Slot& slot, const std::string& reason, bool refused) {
  const Peer& peer = this->peer(slot.rank);
  if (failure_.failed() || peer.left) return slot.attempt.reset();
  if (slot.attempt->try_next(peer.addresses.all(), reason, refused)) {
    owner_.lost(slot.rank, "left the group or died: nobody answers at " + slot.attempt->tried());
  }
}

std::string TcpConnections::tried(int rank) const {
  const Peer* const peer = find(rank);
  return peer == nullptr || !peer->slots[0]->attempt ? "" : peer->slots[0]->attempt->tried();
}

bool TcpConnections::is_undecided(const TcpHandshake& handshake) {
  // The connection that is there may be one that the peer has closed.
  return peer(handshake.peer()).parking.is_under_way();
}

bool TcpConnections::admit(TcpHandshake& handshake) {
  Slot& slot = this->slot(handshake.peer(), handshake.stream());
  if (slot.stream.is_open() || slot.inbound) return false;
  if (slot.attempt) {
    // The lower rank insists, unless its own attempt found no way in its first round: there may be a way in one
    // direction only. After its hello it insists in every round, because the higher rank may have agreed by then.
    if (self_.rank < handshake.peer() && slot.attempt->is_promising()) return false;
    slot.attempt.reset();
  }
  slot.inbound = true;
  return true;
}

void TcpConnections::admitted(TcpHandshake& handshake, bool done) {
  Slot& slot = this->slot(handshake.peer(), handshake.stream());
  slot.inbound = false;
  if (done) {
    open(slot, handshake);
  } else {
    begin_missing(handshake.peer());
  }
}

void TcpConnections::open(Slot& slot, TcpHandshake& handshake) {
  open_.push_back(&slot);
  slot.stream.open(handshake.take_fd());
  poller_.watch_stream(slot.stream);
  if (!congestion_.settle(slot.stream.fd())) unsettled_.push_back(&slot.stream);
  if (slot.number != 0) return;
  limit_silence(slot.stream.fd(), unanswered_);
  owner_.opened(slot.rank);
  begin_missing(slot.rank);
}

void TcpConnections::settle_congestion() {
  const auto settled = [this](const TcpStream* stream) {
    return !stream->is_open() || congestion_.settle(stream->fd());
  };
  unsettled_.erase(std::remove_if(unsettled_.begin(), unsettled_.end(), settled), unsettled_.end());
}

bool TcpConnections::lacks_descriptors(const std::string& purpose, int error) {
  if (acceptor_.send_stranger_away()) return true;
  if (failure_.failed()) return spare_descriptor();
  owner_.raise(FailureKind::System, self_.describe() + " cannot " + purpose + ": " + text_of_error(error) +
                                        ". To be connected to all others of the group takes a rank up to " +
                                        std::to_string(self_.most_connections()) + " descriptors. " +
                                        describe_descriptors());
  return false;
}

bool TcpConnections::spare_descriptor() {
  if (acceptor_.give_up_spare()) return true;
  const auto needless = std::find_if(open_.begin(), open_.end(), [this](const Slot* slot) {
    return slot->number != 0 || (owner_.is_done_with(slot->rank) && !slot->stream.has_sends());
  });
  if (needless == open_.end()) return false;
  (*needless)->stream.finish();
  open_.erase(needless);
  return true;
}

// --- moving ----------------------------------------------------------------------------------------------------------

bool TcpConnections::advance() {
  poller_.poll();
  bool moved = advance_handshakes();
  // By index: what arrives may open further streams.
  for (size_t i = 0; i < open_.size(); ++i) {
    TcpStream& stream = open_[i]->stream;
    if (stream.ready()) moved = stream.advance() || moved;
  }
  return advance_parking() || moved;
}

bool TcpConnections::advance_handshakes() {
  poller_.handshakes_moved = false;
  const bool accepted = acceptor_.advance();
  return (!attempts_.empty() && advance_attempts()) || accepted;
}

bool TcpConnections::anything_ready() const {
  return poller_.listener_moved || poller_.handshakes_moved ||
         std::any_of(open_.begin(), open_.end(), [](const Slot* slot) { return slot->stream.ready(); });
}

bool TcpConnections::owes_control(int rank) const {
  const Peer& peer = *find(rank);
  const TcpStream& control = peer.slots[0]->stream;
  return peer.needed && !peer.left && !control.ended() && control.has_sends();
}

bool TcpConnections::flush_control() {
  bool all = true;
  for (const int rank : met_) {
    if (!owes_control(rank)) continue;
    stream(rank, 0).send_now();
    all = all && !stream(rank, 0).has_sends();
  }
  return all;
}

void TcpConnections::for_each_control(const std::function<void(int, TcpStream&)>& body) {
  for (size_t i = 0; i < open_.size(); ++i) {
    Slot& slot = *open_[i];
    if (peer(slot.rank).parking.is_agreed()) continue;
    if (slot.number == 0 && !slot.stream.ended()) body(slot.rank, slot.stream);
  }
}

// --- closing what nobody uses ----------------------------------------------------------------------------------------

size_t TcpConnections::park() {
  for (const int rank : met_) {
    Peer& peer = this->peer(rank);
    if (peer.left || !peer.parking.offer(peer.streams, card_)) continue;
    peer.needed = false;
    parking_.push_back(rank);
  }
  return parking();
}

void TcpConnections::hear_park(int rank, const FrameHeader& header, const std::string& text, bool idle) {
  Peer& peer = this->peer(rank);
  const ParkNotice theirs = ParkNotice::parse(text, data_streams());
  if (!peer.parking.is_under_way()) {
    peer.needed = peer.needed && !idle;
    parking_.push_back(rank);
  }
  peer.parking.hear(peer.streams, theirs, header.detail != 0, idle, card_);
  if (peer.parking.is_agreed()) peer.addresses = TcpAddresses(theirs.card, card_);
}

void TcpConnections::end_parking() {
  for (const int rank : std::exchange(parking_, {})) {
    if (peer(rank).parking.cut_short(peer(rank).streams)) parted(rank);
  }
  drop_closed();
}

bool TcpConnections::advance_parking() {
  if (parking_.empty()) return false;
  const size_t before = parking_.size();
  for (const int rank : std::exchange(parking_, {})) {
    Peer& peer = this->peer(rank);
    if (peer.parking.advance(peer.streams)) parted(rank);
    if (peer.parking.is_under_way()) parking_.push_back(rank);
  }
  drop_closed();
  if (open_.empty() && attempts_.empty() && acceptor_.is_idle()) poller_.close_unused();
  return parking_.size() < before;
}

void TcpConnections::drop_closed() {
  const auto is_closed = [](const Slot* slot) { return !slot->stream.is_open(); };
  open_.erase(std::remove_if(open_.begin(), open_.end(), is_closed), open_.end());
}

void TcpConnections::parted(int rank) {
  Peer& peer = this->peer(rank);
  peer.broken.reset();
  // What was posted meanwhile waits for new ones.
  const auto waits = [](const TcpStream* stream) { return stream->has_posted(); };
  peer.needed = peer.needed || std::any_of(peer.streams.begin(), peer.streams.end(), waits);
  begin_missing(rank);
}

void TcpConnections::forget() {
  for (const int rank : met_) {
    for (TcpStream* stream : peer(rank).streams) stream->forget();
  }
}

void TcpConnections::close() noexcept {
  for (Slot* slot : open_) slot->stream.finish();
  open_.clear();
  for (Slot* slot : attempts_) slot->attempt.reset();
  attempts_.clear();
  acceptor_.close();
}

// --- peers that are gone ---------------------------------------------------------------------------------------------

void TcpConnections::said_farewell(int rank, std::string reason) {
  peer(rank).left = Clock::now();
  peer(rank).reason = std::move(reason);
}

std::optional<Clock::time_point> TcpConnections::left(int rank) const {
  const Peer* const peer = find(rank);
  return peer == nullptr ? std::nullopt : peer->left;
}

const char* TcpConnections::absence(int rank) const {
  const Peer* const peer = find(rank);
  if (peer == nullptr) return nullptr;
  if (peer->left) return kLeftGroup;
  return peer->slots[0]->stream.ended() ? "died, or its machine became unreachable" : nullptr;
}

std::string TcpConnections::reason(int rank) const {
  const Peer* const peer = find(rank);
  return peer == nullptr ? "" : describe_reason("rank " + std::to_string(rank), peer->reason);
}

void TcpConnections::check(int rank, bool awaited, bool expected) {
  Peer& peer = this->peer(rank);
  if (peer.parking.is_agreed()) return;
  const TcpStream& control = peer.slots[0]->stream;
  if (control.ended() && !peer.left) owner_.lost(rank, absence(rank) + error_text(control));
  const bool is_silent = control.ended() || (peer.left && !control.is_open());
  const TcpStream* starved = is_silent && awaited ? &control : nullptr;
  for (auto data = peer.streams.begin() + 1; data != peer.streams.end(); ++data, expected = false) {
    const bool never_opens = peer.left && !(*data)->is_open() && ((*data)->has_posted() || expected);
    if ((*data)->starved() || never_opens || (expected && (*data)->dry())) starved = *data;
  }
  // A peer that agrees to close the connections may end those for data before it is heard to do so.
  if (starved == nullptr || (peer.parking.is_under_way() && !is_silent)) return;
  if (peer.left) owner_.lost(rank, absence(rank));
  if (!peer.broken) peer.broken = Clock::now();
  if (Clock::now() - *peer.broken > kGrace) owner_.lost(rank, "broke a connection" + error_text(*starved));
}

void TcpConnections::check_links() {
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + std::chrono::seconds(1);
  for (const Slot* slot : open_) {
    const Peer& peer = *find(slot->rank);
    const bool matters = slot->number != 0 && (!peer.left || slot->stream.has_posted()) && !peer.parking.is_agreed();
    if (!matters || !is_unanswered(slot->stream.fd(), unanswered_)) continue;
    owner_.lost(slot->rank, "has not answered for " + std::to_string(unanswered_.count()) +
                                " ms on a connection; is one of the links down?");
  }
}

bool TcpConnections::has_posted(int rank) const {
  const TcpParking::Streams& all = find(rank)->streams;
  return std::any_of(all.begin() + 1, all.end(), [](const TcpStream* data) { return data->has_posted(); });
}

std::string TcpConnections::describe(int rank) const {
  if (rank == self_.rank) return self_.describe();
  return "rank " + std::to_string(rank) + (names_.empty() ? "" : ' ' + names_[static_cast<size_t>(rank)]);
}

}  // namespace ours
