#include "collectives/tcp/tcp_messages.h"
#include "common/error.h"

// Waiting for messages over TCP, and how long there is hope.

namespace ours {

const char* TcpMessages::absence(int rank, bool sending) {
  const auto& peer = mesh_->peers_[static_cast<size_t>(rank)];
  if (!peer) return nullptr;
  const TcpStream& control = peer->slots[0]->stream;
  if (control.ended() && !peer->left) return "died, or its machine became unreachable";
  if (!peer->left) return nullptr;
  // What it sent before it left may still be on its way.
  const TcpStream& data = peer->slots[kData]->stream;
  if (!sending && data.is_open() && (!data.ended() || data.early() != nullptr)) return nullptr;
  return "left the group (it destroyed it or ended before the others did)";
}

void TcpMessages::check_hope(const Message& message) {
  // Peers that never sent a message are heard on the connections of collectives.
  if (const auto calls = calls_.lock()) calls->look();
  const TcpMesh::Lock lock(mesh_->mutex_);
  if (mesh_->failure_.failed()) return;
  // The mesh would take it for a failure that they do not go through. They are no matter until somebody waits for one.
  for (const int rank : mesh_->met_) {
    TcpStream& data = mesh_->slot(rank, kData).stream;
    const bool receives = incoming_[static_cast<size_t>(rank)].active;
    if (mesh_->peers_[static_cast<size_t>(rank)]->left && data.has_sends() && !receives) data.forget();
  }
  int absent = 0;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == mesh_->rank() || (message.peer != rank && message.peer != kAnySource)) continue;
    const char* const why = absence(rank, message.op == Op::Send);
    if (why == nullptr) continue;
    const bool left = mesh_->peers_[static_cast<size_t>(rank)]->left;
    const std::string gone = mesh_->describe(rank) + ' ' + why;
    if (!left) throw PeerError(gone);
    // A receive from any source can go on until the last peer has left.
    if (message.peer == rank || ++absent == size() - 1) throw PeerLeftError(gone);
  }
  mesh_->check_peers();
}

void TcpMessages::fail(const std::exception_ptr& error) noexcept {
  std::string message;
  const FailureKind kind = TcpFailure::kind_of(error, message);
  if (kind != FailureKind::None) mesh_->fail(kind, message);
}

void TcpMessages::ring() {
  signal(bell_);
  mesh_->wake();
}

bool TcpMessages::rest(const std::function<bool()>& ready) {
  if (watched_.exchange(true)) {
    // One thread watches the connections; it rings when it has seen something.
    bool time_to_look = false;
    wait_on(
        bell_, tcp_wait_policy(), Deadline::after(kLookAround),
        [&] { return time_to_look || ready() || !watched_.load(); }, [&] { time_to_look = true; });
    return time_to_look;
  }
  bool time_to_look = true;
  try {
    time_to_look = watch_connections(ready);
  } catch (...) {
    fail(std::current_exception());
  }
  watched_.store(false);
  signal(bell_);
  return time_to_look;
}

bool TcpMessages::watch_connections(const std::function<bool()>& ready) {
  // ready() may take the lock under which others wait for the mesh's.
  for (Awake awake(tcp_wait_policy());;) {
    const uint32_t before = heard();
    if (ready()) return false;
    {
      TcpMesh::Lock lock(mesh_->mutex_);
      mesh_->sleep(lock, Clock::duration::zero());
      if (mesh_->failure_.failed() || mesh_->listeners_moved_ || mesh_->handshakes_moved_ || mesh_->anything_ready()) {
        return false;
      }
    }
    if (awake.moment([] { return false; })) continue;
    TcpMesh::Lock lock(mesh_->mutex_);
    // Whoever rings or fails from here on writes to what the sleep watches.
    if (heard() != before || mesh_->failure_.failed()) return false;
    const auto began = Clock::now();
    mesh_->sleep(lock, kLookAround);
    return Clock::now() - began >= kLookAround;
  }
}

}  // namespace ours
