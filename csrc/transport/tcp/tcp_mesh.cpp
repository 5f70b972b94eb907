#include "transport/tcp/tcp_mesh.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "common/descriptors.h"
#include "common/error.h"
#include "common/network_interfaces.h"
#include "common/options.h"
#include "common/own_name.h"
#include "transport/tcp/tcp_socket.h"

namespace ours {

namespace {

std::string error_text(const TcpStream& stream) {
  return stream.error() == 0 ? "" : " (" + std::generic_category().message(stream.error()) + ")";
}

}  // namespace

WaitPolicy tcp_wait_policy() {
  constexpr std::chrono::microseconds kAnswer{100};
  WaitPolicy policy;
  policy.awake = std::min(std::chrono::microseconds(options().yield_us), kAnswer);
  return policy;
}

TcpMesh::TcpMesh(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config)
    : plan_(config.plan), congestion_(config.congestion), keys_(std::move(keys)), peers_(static_cast<size_t>(size)) {
  self_.rank = rank;
  self_.size = size;
  self_.host = host_name().substr(0, kHostBytes - 1);
  self_.pid = owner_.pid();
  epoll_ = ProcessFd(with_descriptors([] { return ::epoll_create1(EPOLL_CLOEXEC); }));
  if (epoll_.valid()) wake_ = ProcessFd(with_descriptors([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }));
  if (!wake_.valid()) throw SystemError("cannot watch sockets (epoll, eventfd)", errno);
  spare_ = ProcessFd(with_descriptors([this] { return ::fcntl(wake_.get(), F_DUPFD_CLOEXEC, 0); }));
  watch(wake_.get(), kWakeToken, false);
  listen(config);
}

void TcpMesh::listen(const TcpConfig& config) {
  const std::vector<InterfaceAddress> all = interface_addresses();
  const std::vector<SocketAddress> addresses =
      config.interface.empty() ? addresses_towards(config.master, all) : match_addresses(config.interface, all);
  std::string failures;
  for (const SocketAddress& address : addresses) {
    try {
      listeners_.push_back(listen_at(address, config.ports, congestion_.at_first()));
    } catch (const SystemError& e) {
      // An address may be of a family that is switched off, or just going.
      failures += std::string(failures.empty() ? "" : "; ") + e.what();
      continue;
    }
    card_.addresses.push_back(local_address(listeners_.back().get()));
    watch(listeners_.back().get(), kListenerToken, false);
  }
  if (listeners_.empty())
    throw Error("no address to wait for peers at: " + (failures.empty() ? "none found" : failures));
  card_.host = self_.host;
  card_.pid = self_.pid;
  card_.machine = machine_id();
}

std::shared_ptr<TcpMesh> TcpMesh::join(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config,
                                       Deadline deadline) {
  const std::shared_ptr<TcpMesh> mesh(new TcpMesh(rank, size, std::move(keys), config));
  if (rank == 0) {
    TcpTerms terms;
    terms.secret = draw_nonce();
    terms.plan = config.plan;
    mesh->keys_->set(kTermsKey, terms.text());
  }
  mesh->keys_->set(card_key(rank), mesh->card_.text());
  const TcpTerms terms = TcpTerms::parse(mesh->keys_->get(kTermsKey, deadline));
  mesh->self_.secret = terms.secret;
  mesh->plan_ = terms.plan;
  mesh->self_.streams = terms.plan.streams + 1;
  want_descriptors(mesh->most_connections());
  return mesh;
}

TcpMesh::~TcpMesh() {
  leave();
  // What an engine has, its threads among it, stayed with the process that made it.
  [[maybe_unused]] const TcpCarried* parents = in_child() ? carried_.release() : nullptr;
}

void TcpMesh::set_engine(std::shared_ptr<Engine> engine, size_t least_bytes) {
  engine->set_waker([this] { wake(); });
  const Lock lock(mutex_);
  carried_ = std::make_unique<TcpCarried>(std::move(engine), least_bytes);
}

void TcpMesh::share_failures(const std::shared_ptr<TcpMesh>& a, const std::shared_ptr<TcpMesh>& b) {
  const auto tell = [](const std::shared_ptr<TcpMesh>& from, const std::shared_ptr<TcpMesh>& to) {
    from->failure_.set_listener([weak = std::weak_ptr<TcpMesh>(to)](FailureKind kind, const std::string& message) {
      if (const auto mesh = weak.lock()) mesh->fail(kind, message);
    });
  };
  tell(a, b);
  tell(b, a);
}

std::string TcpMesh::describe_self() const {
  return "rank " + std::to_string(rank()) + " (host " + self_.host + ", pid " + std::to_string(self_.pid) + ")";
}

TcpMesh::Peer& TcpMesh::peer(int rank) {
  std::unique_ptr<Peer>& peer = peers_[static_cast<size_t>(rank)];
  if (!peer) {
    peer = std::make_unique<Peer>();
    met_.push_back(rank);
    for (int stream = 0; stream < self_.streams; ++stream) {
      peer->slots.push_back(std::make_unique<Slot>(rank, stream > 0, static_cast<TcpStream::Handler&>(*this)));
    }
  }
  return *peer;
}

void TcpMesh::introduce(std::vector<std::string> names) {
  const Lock lock(mutex_);
  names_ = std::move(names);
}

std::string TcpMesh::describe(int rank) {
  if (rank == self_.rank) return describe_self();
  std::string& name = peer(rank).name;
  if (name.empty() && !names_.empty()) name = names_[static_cast<size_t>(rank)];
  if (const std::string text = name.empty() ? keys_->known(card_key(rank)) : ""; !text.empty()) {
    name = TcpCard::parse(text).name();
  }
  return "rank " + std::to_string(rank) + (name.empty() ? "" : " " + name);
}

bool TcpMesh::progress() {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) apply(events[static_cast<size_t>(i)].data.u64, events[static_cast<size_t>(i)].events);
  bool moved = false;
  if (listeners_moved_ || queue_left_) accept_all();
  if (handshakes_moved_ || !incoming_.empty()) moved = advance_incoming() || moved;
  if (!attempts_.empty()) moved = advance_attempts() || moved;
  // By index: what arrives may open further streams.
  for (size_t i = 0; i < open_.size(); ++i) {
    if (open_[i].second->ready()) moved = open_[i].second->advance() || moved;
  }
  if (carried_) moved = carried_->advance() || moved;
  return moved;
}

size_t TcpMesh::connections() {
  const Lock lock(mutex_);
  return open_.size();
}

bool TcpMesh::anything_ready() const {
  return std::any_of(open_.begin(), open_.end(), [](const auto& one) { return one.second->ready(); });
}

bool TcpMesh::said_all() {
  bool all = true;
  for (const int rank : met_) {
    const Peer& peer = this->peer(rank);
    TcpStream& control = peer.slots[0]->stream;
    if (!peer.needed || peer.left || control.ended() || !control.has_sends()) continue;
    control.send_now();
    all = all && !control.has_sends();
  }
  return all;
}

void TcpMesh::sleep(Lock& lock, Clock::duration limit) {
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(limit);
  std::array<epoll_event, 64> events;
  sleepers_.fetch_add(1);
  lock.unlock();
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(std::max<int64_t>(ms.count(), 0)));
  lock.lock();
  sleepers_.fetch_sub(1);
  for (int i = 0; i < count; ++i) apply(events[static_cast<size_t>(i)].data.u64, events[static_cast<size_t>(i)].events);
}

void TcpMesh::doze(Lock& lock) {
  constexpr std::chrono::microseconds kMoment{50};
  lock.unlock();
  std::this_thread::sleep_for(kMoment);
  lock.lock();
}

void TcpMesh::apply(uint64_t token, uint32_t events) {
  if (token == kListenerToken) {
    listeners_moved_ = true;
  } else if (token == kHandshakeToken) {
    handshakes_moved_ = true;
  } else if (const auto found = tokens_.find(token); found != tokens_.end()) {
    // An error is found out by reading.
    found->second->set_ready((events & ~EPOLLOUT) != 0, (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0);
  }
}

void TcpMesh::watch(int fd, uint64_t token, bool known) {
  epoll_event event{};
  event.data.u64 = token;
  // Streams keep in mind what they may do until the system refuses it, so that nothing is registered again and again.
  // Each wake-up is an event of its own, so nobody has to take the count back.
  // A queue of strangers of which some have to wait must not end every sleep.
  const bool is_stream = token != kListenerToken && token != kWakeToken;
  event.events = static_cast<uint32_t>(EPOLLIN | EPOLLET | (is_stream ? EPOLLOUT | EPOLLRDHUP : 0));
  if (::epoll_ctl(epoll_.get(), known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) {
    throw SystemError("cannot watch a socket (epoll_ctl)", errno);
  }
}

void TcpMesh::wake() noexcept {
  const uint64_t one = 1;
  // It can only fail where there are 2^64 - 1 wake-ups already.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void TcpMesh::check_peers() {
  for (const int rank : met_) {
    Peer& peer = this->peer(rank);
    const TcpStream& control = peer.slots[0]->stream;
    if (control.ended() && !peer.left) lost(rank, "died, or its machine became unreachable" + error_text(control));
    bool starved = control.ended() && peer.awaited;
    std::string error;
    for (const auto& slot : peer.slots) {
      const TcpStream& stream = slot->stream;
      const bool waits = stream.has_sends() || stream.has_receives() || peer.expected;
      const bool never_open = peer.left && !stream.is_open() && waits;
      const bool dry = peer.expected && stream.dry();
      if (&stream == &control || !(stream.starved() || never_open || dry)) continue;
      starved = true;
      error = error_text(stream);
    }
    if (!starved) continue;
    if (peer.left) lost(rank, "left the group (it destroyed it or ended before the others did)");
    if (!peer.broken) peer.broken = Clock::now();
    if (Clock::now() - *peer.broken > kGrace) lost(rank, "broke a connection" + error);
  }
  if (carried_) check_carried();
}

void TcpMesh::lost(int rank, const std::string& how) {
  raise(FailureKind::Peer, describe(rank) + ' ' + how + (what_ == nullptr ? "" : " during " + (*what_)()) +
                               "; noticed by " + describe_self() +
                               ". The group cannot be used any more; make a new one without it");
}

void TcpMesh::check_interrupts(Lock& lock, Interrupts& interrupts, const std::function<std::string()>& what) {
  if (!interrupts.due()) return;
  lock.unlock();
  const std::string name = interrupts.look();
  lock.lock();
  if (name.empty()) return;
  raise(FailureKind::System, describe_interrupt(describe_self(), name, "during " + what()));
}

bool TcpMesh::in_child() const { return !owner_.is_here(); }

void TcpMesh::check_usable() const {
  if (in_child()) {
    throw Error("this process (pid " + std::to_string(::getpid()) +
                ") was forked from the one that joined the group (" + describe_self() + ") and has no part in it");
  }
  failure_.check();
  if (left_.load()) throw Error(describe_self() + " has left the group");
}

void TcpMesh::look() noexcept {
  if (failure_.failed() || left_.load() || in_child()) return;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || in_call_ || left_.load()) return;
  try {
    progress();
    check_peers();
  } catch (const std::exception& e) {
    std::string message = e.what();
    const FailureKind kind = TcpFailure::kind_of(std::current_exception(), message);
    if (failure_.record(kind, message)) tell_failure();
    start_herald();
  }
}

}  // namespace ours
