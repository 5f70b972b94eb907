#include "transport/tcp/tcp_mesh.h"

#include <unistd.h>

#include <algorithm>

#include "common/background_thread.h"
#include "common/descriptors.h"
#include "common/error.h"
#include "common/own_name.h"

namespace ours {

TcpMesh::TcpMesh(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config)
    : shared_(TcpSelf{rank, size, 1 + config.plan.streams, host_name(), owner_.pid(), {}}, std::move(keys)),
      plan_(config.plan),
      endpoint_(shared_, config, [this] { propagate_failure(); }) {}

std::shared_ptr<TcpMesh> TcpMesh::join(int rank, int size, const std::shared_ptr<KeyValues>& keys,
                                       const TcpConfig& config, Deadline deadline) {
  const std::shared_ptr<TcpMesh> mesh(new TcpMesh(rank, size, keys, config));
  if (rank == 0) keys->set(kTermsKey, TcpTerms{draw_nonce(), config.plan}.text());
  keys->set(card_key(rank), mesh->card().text());
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, deadline));
  TcpSelf& self = mesh->shared_.self;
  self.secret = terms.secret;
  self.streams = terms.plan.streams + 1;
  mesh->plan_ = terms.plan;
  mesh->plan_.rules = config.plan.rules;
  mesh->endpoint_.connections().begin();
  want_descriptors(self.most_connections());
  TcpIdle::enter(mesh);
  return mesh;
}

TcpMesh::~TcpMesh() {
  leave();
  // The engine's threads stayed in the process that made it.
  if (in_child()) endpoint_.abandon_engine();
}

void TcpMesh::share_failures(const std::shared_ptr<TcpMesh>& a, const std::shared_ptr<TcpMesh>& b) {
  const auto tell = [](const std::shared_ptr<TcpMesh>& from, const std::shared_ptr<TcpMesh>& to) {
    from->shared_.failure.set_listener([weak = std::weak_ptr<TcpMesh>(to)](FailureKind kind, const std::string& why) {
      if (const auto mesh = weak.lock()) mesh->fail(kind, why);
    });
  };
  tell(a, b);
  tell(b, a);
}

void TcpMesh::set_engine(std::shared_ptr<Engine> engine, size_t least_bytes) {
  engine->set_waker([this] { wake(); });
  const Lock lock(mutex_);
  endpoint_.set_engine(std::move(engine), least_bytes);
}

void TcpMesh::introduce(std::vector<std::string> names) {
  const Lock lock(mutex_);
  endpoint_.connections().introduce(std::move(names));
}

size_t TcpMesh::connections() {
  const Lock lock(mutex_);
  return endpoint_.connections().count();
}

void TcpMesh::check_usable() const {
  if (in_child()) {
    throw Error("this process (pid " + std::to_string(::getpid()) +
                ") was forked from the one that joined the group (" + describe_self() + ") and has no part in it");
  }
  failure().check();
  if (has_left()) throw Error(describe_self() + " has left the group");
}

TcpMesh::Lock TcpMesh::use() {
  last_use_.store(TcpIdle::count_use());
  return lock();
}

template <class Body>
void TcpMesh::between_calls(Body&& body) noexcept {
  if (failure().failed() || has_left() || in_child()) return;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || endpoint_.calls().is_under_way() || has_left()) return;
  try {
    body();
  } catch (const std::exception&) {
    if (!has_left()) endpoint_.fail(std::current_exception());
  }
}

void TcpMesh::look() noexcept {
  between_calls([this] {
    endpoint_.progress();
    endpoint_.check();
  });
}

size_t TcpMesh::idle_connections(bool looks) noexcept {
  size_t count = 0;
  between_calls([&] {
    TcpConnections& connections = endpoint_.connections();
    if (!endpoint_.is_idle() || connections.count() == 0) return;
    if (looks) endpoint_.progress();
    count = connections.count();
  });
  return count;
}

size_t TcpMesh::park() noexcept {
  size_t fewer = 0;
  between_calls([&] {
    TcpConnections& connections = endpoint_.connections();
    const size_t before = connections.count();
    if (before == 0 || !endpoint_.is_idle()) return;
    // What peers have said is heard first: their offers are answered, and not met by others.
    endpoint_.progress();
    const size_t parking = endpoint_.park();
    fewer = before - std::min(before, connections.count() - std::min(connections.count(), parking));
  });
  return fewer;
}

void TcpMesh::fail(FailureKind kind, const std::string& message) noexcept {
  if (has_left() || in_child() || !shared_.failure.record(kind, message)) return;
  wake();
  propagate_failure();
}

void TcpMesh::fail(const std::exception_ptr& error) noexcept {
  std::string message;
  const FailureKind kind = kind_of(error, message);
  if (kind != FailureKind::None) fail(kind, message);
}

void TcpMesh::propagate_failure() noexcept {
  if (propagating_.exchange(true)) return;
  try {
    start_background_thread("ours-failure", [self = shared_from_this()] {
      Lock lock(self->mutex_);
      self->endpoint_.propagate_failure(lock);
    });
  } catch (const std::exception&) {
    // Without the thread, ranks that come later get no answer.
    propagating_.store(false);
  }
}

void TcpMesh::refuse(uint64_t number, const std::string& why) noexcept {
  if (in_child() || has_left() || failure().failed()) return;
  try {
    const Lock lock(mutex_);
    endpoint_.refuse(number, why);
    refused_after_ = endpoint_.calls().count();
    if (lets_connect_) return;
    start_background_thread("ours-refusal", [self = shared_from_this()] { self->let_peers_connect(); });
    lets_connect_ = true;
  } catch (const std::exception&) {
    // Peers that are not connected yet learn of it with this rank's next call, or at their deadline.
  }
}

// While this rank moves nothing, no peer can connect, and those that wait for it would wait in vain.
void TcpMesh::let_peers_connect() {
  constexpr std::chrono::milliseconds kSlice{500};
  Lock lock(mutex_);
  try {
    while (endpoint_.calls().count() == refused_after_ && !has_left() && !failure().failed()) {
      endpoint_.progress();
      endpoint_.connections().flush_control();
      endpoint_.sleep(lock, kSlice);
    }
  } catch (const std::exception&) {
    // The next call will find what is wrong with a connection.
  }
  lets_connect_ = false;
  wake();  // it may have taken an event that another thread waits for
}

void TcpMesh::leave() noexcept {
  if (in_child() || shared_.left.exchange(true)) return;
  wake();
  // The thread that has just recorded a failure may not have got here yet.
  if (failure().failed()) propagate_failure();
  if (propagating_.load()) return;  // that thread closes everything
  const Lock lock(mutex_);
  endpoint_.say_farewell();
}

}  // namespace ours
