#include "transport/tcp/tcp_call.h"

#include <algorithm>

#include "common/error.h"
#include "common/partition.h"

namespace ours {

namespace {

/// Who has seen that somebody else computes on its core sleeps at once for so long: a yield would cost as much as the
/// other's whole turn, each time.
constexpr std::chrono::milliseconds kContended{50};

}  // namespace

TcpCall::TcpCall(TcpMesh& mesh, Facts facts)
    : mesh_(mesh),
      facts_(std::move(facts)),
      half_(facts_.deadline.at() - facts_.deadline.timeout() / 2),
      lock_(mesh.mutex_) {
  mesh_.failure_.check();
  if (mesh_.left_.load()) throw Error("this rank has left the group");
  ++mesh_.calls_;
  mesh_.number_ = facts_.number;
  mesh_.signature_ = facts_.signature;
  mesh_.what_ = &facts_.what;
  mesh_.mismatch_ = &facts_.mismatch;
  mesh_.in_call_ = true;
  if (mesh_.ushers_) mesh_.wake();
  mesh_.declared_.clear();
  mesh_.settle_congestion();
  // What came before this rank did has not been compared with anything yet.
  try {
    for (size_t i = 0; i < mesh_.open_.size(); ++i) {
      const auto [peer, stream] = mesh_.open_[i];
      if (stream->early() != nullptr) mesh_.check_data(peer, *stream->early());
    }
    for (size_t r = 0; r < mesh_.peers_.size(); ++r) {
      if (!mesh_.peers_[r]) continue;
      mesh_.peers_[r]->awaited = mesh_.peers_[r]->expected = false;
      mesh_.check_refusals(static_cast<int>(r));
      for (const auto& one : mesh_.peers_[r]->agreements) mesh_.check_agreement(static_cast<int>(r), one);
    }
  } catch (...) {
    mesh_.in_call_ = false;
    mesh_.what_ = nullptr;
    throw;
  }
}

TcpCall::~TcpCall() {
  mesh_.in_call_ = false;
  mesh_.what_ = nullptr;
  mesh_.mismatch_ = nullptr;
  if (!mesh_.failure_.failed() && !mesh_.left_.load() && std::uncaught_exceptions() == exceptions_) return;
  // Nothing may refer to the buffers of a call that has ended.
  for (const auto& peer : mesh_.peers_) {
    if (!peer) continue;
    for (const auto& slot : peer->slots) slot->stream.forget();
  }
  if (mesh_.carried_) mesh_.carried_->forget();
}

size_t TcpCall::parts(size_t bytes) const { return std::max<size_t>(1, piece_count(bytes, mesh_.plan_.chunk_bytes)); }

FrameHeader TcpCall::header(const Message& message, size_t part) const {
  FrameHeader header;
  header.detail = message.detail;
  header.phase = message.phase;
  header.part = static_cast<uint32_t>(part);
  header.call = mesh_.calls_;
  header.total = message.bytes;
  header.bytes = piece_of(message.bytes, mesh_.plan_.chunk_bytes, part).size();
  header.signature = facts_.signature;
  return header;
}

bool TcpCall::is_carried(const FrameHeader& header) const {
  return mesh_.carried_ != nullptr && mesh_.carried_->takes(header.bytes);
}

TcpStream& TcpCall::stream(int peer, size_t part) {
  // Headers alone need one only, which keeps the engine's messages in their order.
  const size_t streams = mesh_.carried_ == nullptr ? static_cast<size_t>(mesh_.plan_.streams) : 1;
  return mesh_.slot(peer, static_cast<int>(1 + part % streams)).stream;
}

void TcpCall::agree(uint32_t round, int to) {
  reach(to);
  FrameHeader header;
  header.kind = FrameKind::Agree;
  header.part = round;
  header.call = mesh_.calls_;
  header.signature = facts_.signature;
  mesh_.slot(to, 0).stream.post_send(header, std::string());
}

bool TcpCall::agreed(uint32_t round, int from) {
  reach(from);
  std::vector<TcpMesh::Agreement>& all = mesh_.peer(from).agreements;
  const auto found = std::find_if(all.begin(), all.end(), [&](const TcpMesh::Agreement& one) {
    return one.call == mesh_.calls_ && one.round == round;
  });
  if (found == all.end()) {
    mesh_.peer(from).awaited = true;
    return false;
  }
  mesh_.peer(from).awaited = false;
  all.erase(found);
  return true;
}

std::byte* TcpCall::keep(size_t bytes) {
  kept_.emplace_back(new std::byte[bytes]);
  return kept_.back().get();
}

void TcpCall::reach(int peer) { mesh_.need(peer, lock_, facts_.deadline, facts_.what); }

void TcpCall::send_part(const Message& message, size_t part, const void* part_data, size_t* done) {
  reach(message.peer);
  FrameHeader frame = header(message, part);
  if (is_carried(frame)) {
    const TcpCarried::Announcement announcement = mesh_.carried_->send(message.peer, part_data, frame.bytes, done);
    frame.carried = announcement.number;
    done = announcement.through;
  }
  stream(message.peer, message.lane + part).post_send(frame, part_data, done);
}

void TcpCall::receive_part(const Message& message, size_t part, void* part_data, size_t* done) {
  reach(message.peer);
  FrameHeader frame = header(message, part);
  frame.carried = is_carried(frame) ? 1 : 0;  // some number
  stream(message.peer, message.lane + part).post_receive(frame, part_data, done);
}

void TcpCall::send(const Message& message, const void* data, size_t* done) {
  for (size_t part = 0; part < parts(message.bytes); ++part) {
    const size_t begin = piece_of(message.bytes, mesh_.plan_.chunk_bytes, part).begin;
    send_part(message, part, static_cast<const std::byte*>(data) + begin, done);
  }
}

void TcpCall::receive(const Message& message, void* data, size_t* done) {
  for (size_t part = 0; part < parts(message.bytes); ++part) {
    const size_t begin = piece_of(message.bytes, mesh_.plan_.chunk_bytes, part).begin;
    receive_part(message, part, static_cast<std::byte*>(data) + begin, done);
  }
}

const FrameHeader* TcpCall::next_from(int peer) {
  const FrameHeader* header = stream(peer, 0).early();
  return header != nullptr && header->call == mesh_.calls_ ? header : nullptr;
}

void TcpCall::come_back() noexcept {
  lock_.lock();
  mesh_.absent_.clear();
}

void TcpCall::look(const std::vector<uint32_t>& absent) {
  const TcpMesh::Lock lock(mesh_.mutex_);
  mesh_.progress();
  mesh_.failure_.check();
  if (mesh_.left_.load()) throw Error("this rank has left the group");
  mesh_.check_peers();
  mesh_.absent_ = absent;
  if (half_over()) mesh_.declare_waiting();
}

void TcpCall::fail(const std::exception_ptr& error) noexcept {
  try {
    std::string message;
    const FailureKind kind = TcpFailure::kind_of(error, message);
    if (mesh_.failure_.record(kind, message)) mesh_.tell_failure();
  } catch (const std::exception&) {
    // Out of memory: the herald tries again.
  }
  if (mesh_.failure_.failed()) mesh_.start_herald();
}

std::string TcpCall::names_of(const std::vector<uint32_t>& ranks) {
  const TcpMesh::Lock lock(mesh_.mutex_);
  return mesh_.names_of(ranks);
}

void TcpCall::expect(int peer, bool expected) {
  reach(peer);
  mesh_.peer(peer).expected = expected;
}

void TcpCall::run(const std::function<bool()>& step) {
  const WaitPolicy policy = tcp_wait_policy();
  std::optional<Awake> awake(policy);
  Interrupts interrupts;
  // Who gives its core to somebody who computes gets it back late; one who sleeps gets it as soon as data is there.
  bool over = false;
  while (true) {
    const bool moved = mesh_.progress();
    // Peers may still need to hear that this rank was in the call, and it may not make another one for long.
    over = over || step();
    if (over && mesh_.said_all()) return;
    mesh_.failure_.check();
    if (mesh_.left_.load()) throw Error("this rank has left the group");
    mesh_.check_peers();
    const auto now = Clock::now();
    if (now >= facts_.deadline.at()) mesh_.time_out(facts_.deadline, facts_.what());
    mesh_.check_interrupts(lock_, interrupts, facts_.what);
    if (moved || mesh_.anything_ready()) {
      awake.emplace(policy);
      continue;
    }
    if (now >= half_) mesh_.declare_waiting();
    const bool dozes = mesh_.carried_ && mesh_.carried_->needs_calls();
    if (now >= mesh_.contended_until_) {
      lock_.unlock();
      const bool stays_awake = awake->moment([] { return false; });
      lock_.lock();
      if (stays_awake) continue;
      const auto after = Clock::now();
      if (after - now > kForeignWork) mesh_.contended_until_ = after + kContended;
    }
    if (dozes) {
      TcpMesh::doze(lock_);
      continue;
    }
    mesh_.sleep(lock_, std::min<Clock::duration>(facts_.deadline.at() - now, kLookAround));
  }
}

}  // namespace ours
