#include <algorithm>
#include <cstring>

#include "common/background_thread.h"
#include "common/error.h"
#include "transport/tcp/tcp_mesh.h"

// What ranks tell each other when something goes wrong. A rank whose group fails says so on every connection that it
// has; whoever hears it has failed too, and says so on all of its own. So the news reach every rank that is in a call,
// along the very connections that it waits on. Ranks that come later connect to one that has failed already, and get
// the message from its herald.
//
// Who waits in vain should say for whom; but that one may be waiting itself. When half of the time has passed, ranks
// therefore tell their neighbours that they wait and for whom, and pass on what they are told: at the end all know the
// ranks that are really absent.

namespace ours {

namespace {

constexpr size_t kMostAgreements = 4096;
constexpr size_t kMostRefusals = 4;

}  // namespace

void TcpMesh::check_data(int peer, const FrameHeader& header) {
  if (header.call > calls_) return;  // of a call that this rank has yet to make
  if (header.call < calls_ || !in_call_) garbage(peer, "it belongs to a call that is over");
  if (header.signature == signature_) return;
  raise(FailureKind::Mismatch, (*mismatch_)(peer, header.signature));
}

void TcpMesh::check_agreement(int rank, const Agreement& agreement) {
  if (!in_call_ || agreement.call != calls_ || agreement.signature == signature_) return;
  raise(FailureKind::Mismatch, (*mismatch_)(rank, agreement.signature));
}

void TcpMesh::control(int rank, const FrameHeader& header, const std::string& payload) {
  Peer& peer = this->peer(rank);
  switch (header.kind) {
    case FrameKind::Failure: {
      const bool known = header.detail > static_cast<uint8_t>(FailureKind::None) &&
                         header.detail <= static_cast<uint8_t>(FailureKind::Aborted);
      failure_.record(known ? static_cast<FailureKind>(header.detail) : FailureKind::System, payload);
      tell_failure();
      start_herald();
      break;
    }
    case FrameKind::Bye:
      peer.left = true;
      break;
    case FrameKind::Agree:
      // Each call has few rounds, and nobody is far ahead of a rank that it must hear from.
      if (peer.agreements.size() >= kMostAgreements) garbage(rank, "it is too far ahead");
      peer.agreements.push_back({header.call, header.part, header.signature});
      check_agreement(rank, peer.agreements.back());
      break;
    case FrameKind::Refused:
      if (peer.refusals.size() == kMostRefusals) peer.refusals.pop_front();
      peer.refusals.push_back({header.call, payload});
      check_refusals(rank);
      break;
    case FrameKind::Monitor:
      peer.monitor = std::max(peer.monitor, header.call);
      break;
    case FrameKind::Waiting: {
      peer.waiting_call = header.call;
      peer.causes.clear();
      for (size_t at = 0; at + sizeof(uint32_t) <= payload.size(); at += sizeof(uint32_t)) {
        uint32_t cause = 0;
        std::memcpy(&cause, payload.data() + at, sizeof(cause));
        if (cause < static_cast<uint32_t>(size())) peer.causes.push_back(cause);
      }
      break;
    }
    case FrameKind::Data:
      break;  // fault_of() lets none pass
  }
}

void TcpMesh::check_refusals(int rank) {
  if (!in_call_) return;
  const std::string why = refusal(rank, number_);
  if (!why.empty()) raise(FailureKind::Mismatch, why);
}

std::string TcpMesh::refusal(int rank, uint64_t number) {
  for (const Refused& one : rank == self_.rank ? refusals_ : peer(rank).refusals) {
    if (one.number == number) return one.why;
  }
  return "";
}

void TcpMesh::tell_refusal(TcpStream& control, const Refused& refusal) {
  FrameHeader header;
  header.kind = FrameKind::Refused;
  header.call = refusal.number;
  control.post_send(header, refusal.why);
  control.send_now();
}

void TcpMesh::refuse(uint64_t number, const std::string& why) noexcept {
  if (in_child() || left_.load() || failure_.failed()) return;
  try {
    const Lock lock(mutex_);
    if (refusals_.size() == kMostRefusals) refusals_.pop_front();
    refusals_.push_back({number, why.substr(0, kMaxFailureBytes)});
    for (const auto& [rank, stream] : open_) {
      if (stream == &peer(rank).slots[0]->stream && !stream->ended()) tell_refusal(*stream, refusals_.back());
    }
    ushered_ = calls_;
    if (ushers_) return;
    start_background_thread("ours-usher", [self = shared_from_this()] { self->usher(); });
    ushers_ = true;
  } catch (const std::exception&) {
    // Peers that are not connected yet hear of it with this rank's next call, or at their deadline.
  }
}

// While it moves nothing, nobody can connect, and those who wait for this rank would do so in vain.
void TcpMesh::usher() {
  constexpr std::chrono::milliseconds kSlice{500};
  Lock lock(mutex_);
  try {
    while (calls_ == ushered_ && !left_.load() && !failure_.failed()) {
      progress();
      said_all();
      sleep(lock, kSlice);
    }
  } catch (const std::exception&) {
    // What is wrong with a connection is found out again by the next call.
  }
  ushers_ = false;
  wake();  // it may have taken an event that another thread waits for
}

void TcpMesh::receive_carried(int peer, const FrameHeader& header, void* to, size_t* done) {
  if (!carried_) garbage(peer, "data comes by an engine that this rank does not use");
  if (!carried_->receive(peer, header.carried, to, header.bytes, done)) {
    garbage(peer, "its messages by the engine between nodes are not numbered in turn");
  }
}

// The engine's own word on a rank that died is of connections and endpoints, so the mesh may say first who it was.
void TcpMesh::check_carried() {
  // What a peer had sent before it left may still be on its way.
  constexpr std::chrono::seconds kFarewell{2};
  if (!carried_->any()) return;
  const auto now = Clock::now();
  for (const int rank : met_) {
    if (!peer(rank).left || !carried_->waits_for(rank)) continue;
    std::optional<Clock::time_point>& since = peer(rank).broken;
    if (!since) since = now;
    if (now - std::max(*since, carried_->last_moved(rank)) > kFarewell) {
      lost(rank, "left the group (it destroyed it or ended before the others did)");
    }
  }
  const std::optional<TcpCarried::Fault>& fault = carried_->fault();
  if (!fault || now - fault->since < kGrace) return;
  raise(FailureKind::System, "the engine between nodes failed: " + fault->text + ' ' + describe(fault->peer) +
                                 (what_ == nullptr ? "" : " during " + (*what_)()) + ": " + fault->why +
                                 "; noticed by " + describe_self() +
                                 ". The group cannot be used any more; make a new one");
}

void TcpMesh::garbage(int peer, const char* fault) {
  raise(FailureKind::System, describe(peer) + " sent " + describe_self() + " what makes no sense: " + fault +
                                 ". Do all ranks use one version of this package?");
}

void TcpMesh::raise(FailureKind kind, const std::string& message) {
  if (failure_.record(kind, message)) tell_failure();
  start_herald();
  failure_.check();
  throw Error(message);
}

void TcpMesh::fail(FailureKind kind, const std::string& message) noexcept {
  if (left_.load() || in_child()) return;
  if (!failure_.record(kind, message)) return;
  wake();
  start_herald();
}

void TcpMesh::tell_failure() {
  FrameHeader header;
  header.kind = FrameKind::Failure;
  header.detail = static_cast<uint8_t>(failure_.kind());
  const std::string message = failure_.message().substr(0, kMaxFailureBytes);
  for (size_t i = 0; i < open_.size(); ++i) {
    const auto [rank, stream] = open_[i];
    Peer& peer = this->peer(rank);
    if (stream != &peer.slots[0]->stream || peer.told || stream->ended()) continue;
    peer.told = true;
    stream->post_send(header, message);
    stream->send_now();
  }
}

void TcpMesh::start_herald() noexcept {
  if (heralded_.exchange(true)) return;
  try {
    start_background_thread("ours-herald", [self = shared_from_this()] { self->herald(); });
  } catch (const std::exception&) {
    // Without it, ranks that come later hear that nobody answers.
    heralded_.store(false);
  }
}

void TcpMesh::herald() {
  constexpr std::chrono::milliseconds kLookAround{100};
  // So long after this rank has left, those who come may still hear why: they are about to notice that it has.
  constexpr std::chrono::seconds kAfterword{3};
  Lock lock(mutex_);
  if (carried_) carried_->close();
  std::optional<Clock::time_point> end;
  while (!end || Clock::now() < *end) {
    try {
      if (listeners_moved_ || queue_left_) accept_all();
      advance_incoming();
      // What has begun may have been accepted already, by a peer that waits now.
      advance_attempts();
      tell_failure();
      for (const auto& [rank, stream] : open_) {
        if (stream == &peer(rank).slots[0]->stream) stream->send_now();
      }
    } catch (const std::exception&) {
      // Nothing more can be said to that one.
    }
    if (left_.load() && all_told()) break;
    if (left_.load() && !end) end = Clock::now() + kAfterword;
    sleep(lock, kLookAround);
  }
  close_all();
}

bool TcpMesh::all_told() {
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const auto& peer = peers_[static_cast<size_t>(r)];
    if (!peer || !peer->told || peer->slots[0]->stream.has_sends()) return false;
  }
  return true;
}

void TcpMesh::leave() noexcept {
  if (in_child() || left_.exchange(true)) return;
  wake();
  // Whoever has just recorded a failure may not have come to this yet.
  if (failure_.failed()) start_herald();
  if (heralded_.load()) return;  // it closes everything
  const Lock lock(mutex_);
  FrameHeader header;
  header.kind = FrameKind::Bye;
  try {
    for (const auto& [rank, stream] : open_) {
      if (stream != &peer(rank).slots[0]->stream) continue;
      stream->post_send(header, std::string());
      stream->send_now();
    }
  } catch (const std::exception&) {
    // Out of memory: peers see that this rank is gone.
  }
  close_all();
}

void TcpMesh::close_all() noexcept {
  if (carried_) carried_->close();
  for (const auto& one : open_) one.second->finish();
  open_.clear();
  tokens_.clear();
  attempts_.clear();
  incoming_.clear();
  listeners_.clear();
  for (auto& peer : peers_) {
    if (!peer) continue;
    for (auto& slot : peer->slots) slot->attempt.reset();
  }
}

bool TcpMesh::spare_descriptor() {
  if (spare_.valid()) {
    spare_.reset();
    return true;
  }
  const auto needless = std::find_if(open_.begin(), open_.end(), [this](const auto& one) {
    const auto [rank, stream] = one;
    const Peer& peer = this->peer(rank);
    return stream != &peer.slots[0]->stream || (peer.told && !stream->has_sends());
  });
  if (needless == open_.end()) return false;
  TcpStream* const stream = needless->second;
  open_.erase(needless);
  tokens_.erase(std::find_if(tokens_.begin(), tokens_.end(), [&](const auto& one) { return one.second == stream; }));
  stream->finish();
  return true;
}

std::vector<uint32_t> TcpMesh::waited_for() const {
  std::vector<uint32_t> ranks;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r]) continue;
    const auto& slots = peers_[r]->slots;
    const bool waits =
        peers_[r]->awaited || peers_[r]->expected ||
        std::any_of(slots.begin() + 1, slots.end(),
                    [](const auto& slot) { return slot->stream.has_receives() || slot->stream.has_sends(); }) ||
        (carried_ && carried_->waits_for(static_cast<int>(r)));
    if (waits) ranks.push_back(static_cast<uint32_t>(r));
  }
  return ranks;
}

std::vector<uint32_t> TcpMesh::causes() const {
  if (!absent_.empty()) return absent_;
  const std::vector<uint32_t> waited = waited_for();
  std::vector<uint32_t> found;
  for (const uint32_t rank : waited) {
    const Peer& peer = *peers_[rank];
    if (peer.waiting_call != calls_) {
      found.push_back(rank);
    } else {
      found.insert(found.end(), peer.causes.begin(), peer.causes.end());
    }
  }
  found.erase(std::remove(found.begin(), found.end(), static_cast<uint32_t>(rank())), found.end());
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (found.size() > kMaxCauses) found.resize(kMaxCauses);
  return found.empty() ? waited : found;
}

void TcpMesh::declare_waiting() {
  std::vector<uint32_t> now = causes();
  if (now == declared_) return;
  declared_ = std::move(now);
  FrameHeader header;
  header.kind = FrameKind::Waiting;
  header.call = calls_;
  const std::string payload(reinterpret_cast<const char*>(declared_.data()), declared_.size() * sizeof(uint32_t));
  for (const auto& [rank, stream] : open_) {
    if (stream != &peer(rank).slots[0]->stream || stream->ended()) continue;
    stream->post_send(header, payload);
    stream->send_now();
  }
}

std::string TcpMesh::names_of(const std::vector<uint32_t>& absent) {
  constexpr size_t kMostNamed = 8;
  std::string names;
  for (size_t i = 0; i < std::min(absent.size(), kMostNamed); ++i) {
    const int rank = static_cast<int>(absent[i]);
    names += (names.empty() ? "" : ", ") + describe(rank);
    const auto& attempt = slot(rank, 0).attempt;
    if (attempt && !attempt->tried.empty()) names += " (tried " + attempt->tried + ")";
  }
  if (absent.size() > kMostNamed) names += " and " + std::to_string(absent.size() - kMostNamed) + " more";
  return names;
}

void TcpMesh::time_out(Deadline deadline, const std::string& what) {
  const std::string names = names_of(causes());
  raise(FailureKind::Timeout, what + ": Timed out waiting " + std::to_string(deadline.timeout().count()) + "ms on " +
                                  describe_self() + " for " + (names.empty() ? "nobody that is known" : names) +
                                  ". Are they still computing (raise the timeout), stopped, or on another code path?");
}

}  // namespace ours
