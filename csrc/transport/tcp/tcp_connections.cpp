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
constexpr std::chrono::milliseconds kBetweenRounds{50};
/// How long to wait until a connection is made,
constexpr std::chrono::seconds kConnectLimit{2};
/// and until a peer, which may be busy, says something, if it has other addresses to try.
constexpr std::chrono::seconds kWordsLimit{30};
constexpr std::chrono::hours kForever{24 * 365};
/// After this many rounds in which every address refused, the peer is taken to be gone.
constexpr int kRefusedRounds = 2;
/// How long to wait for the last word of a dying rank, which comes on another connection than its data.
constexpr std::chrono::milliseconds kGrace{300};

std::string error_text(const TcpStream& stream) {
  return stream.error() == 0 ? "" : " (" + text_of_error(stream.error()) + ")";
}

}  // namespace

TcpConnections::TcpConnections(const TcpSelf& self, const TcpConfig& config, const GroupFailure& failure,
                               TcpPoller& poller, Owner& owner, TcpCard& card)
    : self_(self),
      failure_(failure),
      poller_(poller),
      owner_(owner),
      congestion_(config.congestion),
      acceptor_(poller, *this),
      machine_(card.machine),
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
    }
  }
  return *peer;
}

// --- connecting ------------------------------------------------------------------------------------------------------

bool TcpConnections::is_complete(int rank) {
  const auto& slots = peer(rank).slots;
  return std::all_of(slots.begin(), slots.end(), [](const auto& slot) { return slot->stream.is_open(); });
}

void TcpConnections::need(int rank) {
  peer(rank).needed = true;
  begin_missing(rank);
}

void TcpConnections::need(int rank, const TcpCard& card) {
  Peer& peer = this->peer(rank);
  peer.addresses.clear();
  peer.mesh = card.mesh;
  for (const bool loopback : {false, true}) {
    for (const SocketAddress& address : card.addresses) {
      // Another machine's loopback address would lead to this machine.
      if (address.is_loopback() == loopback && (!loopback || card.machine == machine_)) {
        peer.addresses.push_back(address);
      }
    }
  }
  if (peer.addresses.empty()) {
    owner_.raise(FailureKind::Peer, describe(rank) + " can be reached on its own machine only: it published " +
                                        listed(card.addresses, [](const auto& one) { return one.text(); }) +
                                        ". Set OURS_INTERFACE there to the network that leads to the others");
  }
  need(rank);
}

void TcpConnections::begin_missing(int rank) {
  Peer& peer = this->peer(rank);
  if (!peer.needed || peer.left) return;
  // Control comes first, so that once there is data, there is a way to say farewell.
  const int end = peer.slots[0]->stream.is_open() && !failure_.failed() ? self_.streams : 1;
  for (int stream = 0; stream < end; ++stream) {
    Slot& slot = *peer.slots[static_cast<size_t>(stream)];
    if (slot.stream.is_open() || slot.attempt || slot.inbound) continue;
    slot.attempt = std::make_unique<Attempt>();
    slot.attempt->next = Clock::now();
    if (self_.rank > rank) slot.attempt->next += kHigherRankWaits;
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
  Attempt& attempt = *slot.attempt;
  const auto now = Clock::now();
  if (!attempt.handshake) {
    if (now < attempt.next) return false;
    if (!begin_attempt(slot)) return true;
  }
  TcpHandshake& handshake = *attempt.handshake;
  const bool was_connected = handshake.connected();
  const auto state = handshake.advance();
  if (state == TcpHandshake::State::Done) {
    TcpHandshake done = std::move(handshake);
    slot.attempt.reset();
    open(slot, done);
    return true;
  }
  if (state == TcpHandshake::State::Broken) {
    const std::string reason = handshake.reason();
    next_address(slot, reason, handshake.refused());
    return true;
  }
  if (!was_connected && handshake.connected()) {
    const bool has_others = peer(slot.rank).addresses.size() > 1;
    attempt.next = now + (has_others ? Clock::duration(kWordsLimit) : Clock::duration(kForever));
  }
  if (now < attempt.next) return false;
  next_address(slot, handshake.connected() ? "connected, but nobody speaks" : "no answer", false);
  return true;
}

bool TcpConnections::begin_attempt(Slot& slot) {
  ProcessFd fd = begin_connecting(peer(slot.rank).addresses[slot.attempt->address], congestion_.at_first());
  if (!fd.valid()) {
    const int error = errno;
    const bool is_lack = is_lack_of_descriptors(error) && !failure_.failed();
    // Where it makes room, the next round of addresses finds it.
    if (is_lack) lacks_descriptors("connect to " + describe(slot.rank), error);
    next_address(slot, text_of_error(error), error == ECONNREFUSED);
    return false;
  }
  tune_connection(fd.get());
  const int number = fd.get();
  slot.attempt->handshake.emplace(std::move(fd), self_, slot.rank, peer(slot.rank).mesh, slot.number);
  slot.attempt->next = Clock::now() + kConnectLimit;
  poller_.watch_handshake(number);
  return true;
}

void TcpConnections::next_address(Slot& slot, const std::string& reason, bool refused) {
  const Peer& peer = this->peer(slot.rank);
  if (failure_.failed() || peer.left) return slot.attempt.reset();
  Attempt& attempt = *slot.attempt;
  attempt.handshake.reset();
  if (attempt.address == 0) {
    attempt.tried.clear();
    attempt.refused = 0;
  }
  attempt.tried += (attempt.tried.empty() ? "" : ", ") + peer.addresses[attempt.address].text() + " (" + reason + ")";
  attempt.refused += refused ? 1 : 0;
  attempt.next = Clock::now();
  if (++attempt.address < peer.addresses.size()) return;
  attempt.address = 0;
  attempt.next += kBetweenRounds;
  const bool nobody = attempt.refused == peer.addresses.size();
  if (++attempt.rounds >= kRefusedRounds && nobody) {
    owner_.lost(slot.rank, "left the group or died: nobody answers at " + attempt.tried);
  }
}

std::string TcpConnections::tried(int rank) const {
  const Peer* const peer = find(rank);
  return peer == nullptr || !peer->slots[0]->attempt ? "" : peer->slots[0]->attempt->tried;
}

bool TcpConnections::admit(TcpHandshake& handshake) {
  Slot& slot = this->slot(handshake.peer(), handshake.stream());
  if (slot.stream.is_open() || slot.inbound) return false;
  if (slot.attempt) {
    // The lower rank insists, unless its own attempt found no way in its first round: there may be a way in one
    // direction only.
    const bool insists = self_.rank < handshake.peer() && slot.attempt->rounds == 0;
    if (insists) return false;
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
  limit_silence(slot.stream.fd());
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
  return moved;
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
    if (slot.number == 0 && !slot.stream.ended()) body(slot.rank, slot.stream);
  }
}

void TcpConnections::forget() {
  for (const int rank : met_) {
    for (const auto& slot : peer(rank).slots) slot->stream.forget();
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
  if (peer->left) return "left the group (it destroyed it or ended before the others did)";
  return peer->slots[0]->stream.ended() ? "died, or its machine became unreachable" : nullptr;
}

std::string TcpConnections::reason(int rank) const {
  const Peer* const peer = find(rank);
  return peer == nullptr ? "" : describe_reason("rank " + std::to_string(rank), peer->reason);
}

void TcpConnections::check(int rank, bool awaited, bool expected) {
  Peer& peer = this->peer(rank);
  const TcpStream& control = peer.slots[0]->stream;
  if (control.ended() && !peer.left) owner_.lost(rank, absence(rank) + error_text(control));
  const TcpStream* starved = control.ended() && awaited ? &control : nullptr;
  for (auto slot = peer.slots.begin() + 1; slot != peer.slots.end(); ++slot) {
    const TcpStream& data = (*slot)->stream;
    const bool waits = data.has_sends() || data.has_receives() || expected;
    const bool never_opens = peer.left && !data.is_open() && waits;
    if (data.starved() || never_opens || (expected && data.dry())) starved = &data;
  }
  if (starved == nullptr) return;
  if (peer.left) owner_.lost(rank, absence(rank));
  if (!peer.broken) peer.broken = Clock::now();
  if (Clock::now() - *peer.broken > kGrace) owner_.lost(rank, "broke a connection" + error_text(*starved));
}

bool TcpConnections::has_posted(int rank) const {
  const auto& slots = find(rank)->slots;
  return std::any_of(slots.begin() + 1, slots.end(),
                     [](const auto& slot) { return slot->stream.has_receives() || slot->stream.has_sends(); });
}

std::string TcpConnections::describe(int rank) const {
  if (rank == self_.rank) return self_.describe();
  return "rank " + std::to_string(rank) + (names_.empty() ? "" : ' ' + names_[static_cast<size_t>(rank)]);
}

}  // namespace ours
