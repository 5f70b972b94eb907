#include <algorithm>
#include <cerrno>
#include <system_error>

#include "common/descriptors.h"
#include "common/error.h"
#include "transport/tcp/tcp_mesh.h"
#include "transport/tcp/tcp_socket.h"

// How two ranks get connected. Whoever needs a peer connects to it, one connection a stream, trying the addresses of
// its card in turn. Both may do so at once: the lower rank insists on its own attempt, the higher one gives its own up,
// and so that this is rare, it begins a moment later.
//
// Whoever connects to a listener is a stranger until it has proved otherwise. Strangers cost a descriptor for a few
// seconds. There is room for all connections that the group can have and kMostStrangers more. Where that is taken, one
// that has said nothing for a while makes way for the next, and the others wait in the system's queue: peers that are
// not slow never push each other out, however many come at a time.

namespace ours {

namespace {

constexpr size_t kMostStrangers = 64;
constexpr std::chrono::seconds kStrangerLimit{10};
constexpr std::chrono::milliseconds kTimeToSpeak{500};
constexpr std::chrono::milliseconds kHigherRankWaits{20};
constexpr std::chrono::milliseconds kBetweenRounds{50};
/// To get an answer from an address,
constexpr std::chrono::seconds kConnectLimit{2};
/// and for a peer to say something: it may be busy. Where it has other addresses, they are tried then.
constexpr std::chrono::seconds kWordsLimit{30};
constexpr std::chrono::hours kForever{24 * 365};
/// Rounds in which every address refused, after which nobody is there.
constexpr int kRefusedRounds = 2;

/// Lets go of a lock for a while.
class Released {
 public:
  explicit Released(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  ~Released() { lock_.lock(); }

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace

void TcpMesh::need(int rank, Lock& lock, Deadline deadline, const std::function<std::string()>& what) {
  Peer& peer = this->peer(rank);
  if (peer.needed) return;
  if (listeners_moved_ || queue_left_) accept_all();
  const bool complete =
      std::all_of(peer.slots.begin(), peer.slots.end(), [](const auto& slot) { return slot->stream.is_open(); });
  if (!complete) read_card(rank, lock, deadline, what);
  peer.needed = true;
  begin_missing(rank);
}

void TcpMesh::begin_missing(int rank) {
  Peer& peer = this->peer(rank);
  if (!peer.needed || peer.left) return;
  // Control comes first: once there is data, there is a way to say farewell.
  const int end = peer.slots[0]->stream.is_open() && !failure_.failed() ? self_.streams : 1;
  for (int stream = 0; stream < end; ++stream) {
    Slot& slot = *peer.slots[static_cast<size_t>(stream)];
    if (slot.stream.is_open() || slot.attempt || slot.inbound) continue;
    slot.attempt = std::make_unique<Attempt>();
    slot.attempt->next = Clock::now();
    if (self_.rank > rank) slot.attempt->next += kHigherRankWaits;
    attempts_.emplace_back(rank, stream);
  }
}

void TcpMesh::read_card(int rank, Lock& lock, Deadline deadline, const std::function<std::string()>& what) {
  std::string text = keys_->known(card_key(rank));
  if (text.empty()) text = await_card(rank, lock, deadline, what);
  const TcpCard card = TcpCard::parse(text);
  Peer& peer = this->peer(rank);
  if (peer.name.empty()) peer.name = card.name();
  for (const bool loopback : {false, true}) {
    for (const SocketAddress& address : card.addresses) {
      // Another machine's loopback leads to this one.
      if (address.is_loopback() == loopback && (!loopback || card.machine == card_.machine)) {
        peer.addresses.push_back(address);
      }
    }
  }
  if (peer.addresses.empty()) {
    raise(FailureKind::Peer, describe(rank) + " can be reached on its own machine only: it published " + text +
                                 ". Set OURS_INTERFACE there to the network that leads to the others");
  }
}

std::string TcpMesh::await_card(int rank, Lock& lock, Deadline deadline, const std::function<std::string()>& what) {
  Interrupts interrupts;
  const auto look_around = [&] {
    Lock held(mutex_);
    progress();
    failure_.check();
    if (left_.load()) throw Error("this rank has left the group");
    check_peers();
    check_interrupts(held, interrupts, what);
  };
  std::string late;
  try {
    // Whoever keeps the cards may be slow to answer, or gone.
    const Released released(lock);
    return keys_->await(card_key(rank), deadline, look_around);
  } catch (const TimeoutError& e) {
    late = e.what();
  }
  failure_.check();
  raise(FailureKind::Timeout, what() + ": Timed out waiting " + std::to_string(deadline.timeout().count()) + "ms on " +
                                  describe_self() + " for " + describe(rank) +
                                  ", which has not published its address (" + late +
                                  "). Was it started, and did it fail?");
}

void TcpMesh::accept_all() {
  listeners_moved_ = queue_left_ = false;
  for (const ProcessFd& listener : listeners_) accept_from_queue(listener.get());
}

void TcpMesh::accept_from_queue(int listener) {
  while (true) {
    queue_left_ = queue_left_ || !has_room_for_stranger();
    if (queue_left_) return;
    ProcessFd fd = accept_from(listener);
    if (fd.valid()) {
      tune_connection(fd.get());
      const int number = fd.get();
      incoming_.push_back({TcpHandshake(std::move(fd), self_), Clock::now()});
      watch(number, kHandshakeToken, false);
      continue;
    }
    if (errno == EAGAIN) return;
    const int error = errno;
    if (!is_lack_of_descriptors(error) && error != ENOBUFS && error != ENOMEM) {
      continue;  // that connection ended before it was accepted
    }
    // Before what may throw: whoever comes next takes the queue up.
    queue_left_ = true;
    if (!is_lack_of_descriptors(error) || !lacks_descriptors("accept the connection of a peer", error)) continue;
    queue_left_ = false;
  }
}

bool TcpMesh::has_room_for_stranger() {
  if (incoming_.size() < kMostStrangers + most_connections()) return true;
  const auto oldest =
      std::find_if(incoming_.begin(), incoming_.end(), [](const Incoming& one) { return one.handshake.peer() < 0; });
  if (oldest == incoming_.end()) return true;
  if (Clock::now() < oldest->arrived + kTimeToSpeak) return false;
  incoming_.erase(oldest);
  return true;
}

bool TcpMesh::lacks_descriptors(const char* purpose, int error) {
  if (failure_.failed()) return spare_descriptor();
  raise(FailureKind::System, describe_self() + " cannot " + purpose + ": " + std::generic_category().message(error) +
                                 ". To be connected to all others of the group takes a rank up to " +
                                 std::to_string(most_connections()) + " descriptors. " + describe_descriptors());
}

bool TcpMesh::advance_incoming() {
  bool moved = false;
  handshakes_moved_ = false;
  const auto now = Clock::now();
  for (auto one = incoming_.begin(); one != incoming_.end();) {
    TcpHandshake& handshake = one->handshake;
    auto state = handshake.advance();
    if (handshake.awaits_verdict()) {
      if (!admit(handshake)) {
        one = incoming_.erase(one);
        continue;
      }
      state = handshake.advance();
    }
    const bool over = state != TcpHandshake::State::Going || one->arrived + kStrangerLimit < now;
    if (!over) {
      ++one;
      continue;
    }
    if (handshake.peer() >= 0) {
      slot(handshake.peer(), handshake.stream()).inbound = false;
      if (state == TcpHandshake::State::Done) {
        open(handshake.peer(), handshake.stream(), handshake);
      } else {
        begin_missing(handshake.peer());
      }
      moved = true;
    }
    one = incoming_.erase(one);
  }
  return moved;
}

bool TcpMesh::admit(TcpHandshake& handshake) {
  Slot& slot = this->slot(handshake.peer(), handshake.stream());
  if (slot.stream.is_open() || slot.inbound) return false;
  if (slot.attempt) {
    // Unless its own attempt found no way there in its first round: ways may lead in one direction only.
    const bool insists = self_.rank < handshake.peer() && slot.attempt->rounds == 0;
    if (insists) return false;
    slot.attempt.reset();
    const std::pair<int, int> mine(handshake.peer(), handshake.stream());
    attempts_.erase(std::remove(attempts_.begin(), attempts_.end(), mine), attempts_.end());
  }
  slot.inbound = true;
  handshake.accept();
  return true;
}

bool TcpMesh::advance_attempts() {
  bool moved = false;
  for (size_t i = 0; i < attempts_.size();) {
    const auto [rank, stream] = attempts_[i];
    moved = advance_attempt(rank, stream) || moved;
    if (slot(rank, stream).attempt) {
      ++i;
    } else {
      attempts_.erase(attempts_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return moved;
}

bool TcpMesh::advance_attempt(int rank, int stream) {
  Slot& slot = this->slot(rank, stream);
  Attempt& attempt = *slot.attempt;
  const Peer& peer = this->peer(rank);
  const auto now = Clock::now();
  if (!attempt.handshake) {
    if (now < attempt.next) return false;
    ProcessFd fd = begin_connecting(peer.addresses[attempt.address], congestion_.at_first());
    if (!fd.valid()) {
      if (is_lack_of_descriptors(errno) && !failure_.failed()) {
        lacks_descriptors(("connect to " + describe(rank)).c_str(), errno);
      }
      next_address(rank, stream, std::generic_category().message(errno), errno == ECONNREFUSED);
      return true;
    }
    tune_connection(fd.get());
    const int number = fd.get();
    attempt.handshake.emplace(std::move(fd), self_, rank, stream);
    attempt.next = now + kConnectLimit;
    watch(number, kHandshakeToken, false);
  }
  const bool was_connected = attempt.handshake->connected();
  const auto state = attempt.handshake->advance();
  if (state == TcpHandshake::State::Done) {
    TcpHandshake handshake = std::move(*attempt.handshake);
    slot.attempt.reset();
    open(rank, stream, handshake);
    return true;
  }
  if (state == TcpHandshake::State::Broken) {
    const std::string reason = attempt.handshake->reason();
    next_address(rank, stream, reason, attempt.handshake->refused());
    return true;
  }
  if (!was_connected && attempt.handshake->connected()) {
    attempt.next = now + (peer.addresses.size() > 1 ? Clock::duration(kWordsLimit) : Clock::duration(kForever));
  }
  if (now >= attempt.next) {
    next_address(rank, stream, attempt.handshake->connected() ? "connected, but nobody speaks" : "no answer", false);
    return true;
  }
  return false;
}

void TcpMesh::next_address(int rank, int stream, const std::string& reason, bool refused) {
  Attempt& attempt = *slot(rank, stream).attempt;
  const Peer& peer = this->peer(rank);
  if (failure_.failed() || peer.left) {
    slot(rank, stream).attempt.reset();
    return;
  }
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
    lost(rank, "left the group or died: nobody answers at " + attempt.tried);
  }
}

void TcpMesh::open(int rank, int stream, TcpHandshake& handshake) {
  Slot& slot = this->slot(rank, stream);
  Peer& peer = this->peer(rank);
  if (peer.name.empty()) {
    peer.name = "(host " + handshake.peer_host() + ", pid " + std::to_string(handshake.peer_pid()) + ")";
  }
  const uint64_t token = next_token_++;
  tokens_[token] = &slot.stream;
  open_.emplace_back(rank, &slot.stream);
  slot.stream.open(handshake.take_fd());
  slot.stream.set_ready(true, true);
  watch(slot.stream.fd(), token, true);
  if (!congestion_.settle(slot.stream.fd())) unsettled_.push_back(&slot.stream);
  if (stream != 0) return;
  limit_silence(slot.stream.fd());
  for (const Refused& refusal : refusals_) tell_refusal(slot.stream, refusal);
  begin_missing(rank);
}

void TcpMesh::settle_congestion() {
  const auto settled = [this](const TcpStream* stream) {
    return !stream->is_open() || congestion_.settle(stream->fd());
  };
  unsettled_.erase(std::remove_if(unsettled_.begin(), unsettled_.end(), settled), unsettled_.end());
}

}  // namespace ours
