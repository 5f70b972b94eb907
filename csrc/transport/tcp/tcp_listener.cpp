#include "transport/tcp/tcp_listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <thread>
#include <tuple>

#include "common/background_thread.h"
#include "common/descriptors.h"
#include "common/error.h"
#include "common/process_wide.h"
#include "transport/tcp/tcp_socket.h"

namespace ours {

namespace {

/// Two let a mesh wait for its peers (TcpPoller), of which a group has two, and one is for the connection of a peer,
/// one after the other.
constexpr size_t kSpares = 5;
/// The kernel lets a socket wake no more than 500 by way of an epoll in another.
constexpr size_t kMostPlaces = 400;
constexpr size_t kMostStrangers = 64;
constexpr std::chrono::seconds kStrangerLimit{10};
constexpr std::chrono::milliseconds kTimeToSpeak{500};

struct Listeners {
  using Key = std::tuple<std::string, std::string, uint16_t, uint16_t, std::string>;
  std::map<Key, std::weak_ptr<TcpListener>> by_configuration;

  /// A child's groups have listeners of their own.
  void in_child() { by_configuration.clear(); }
};

void watch(const ProcessFd& epoll, int fd) {
  // Level triggered, so that each mesh that looks finds what none has seen to.
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw SystemError("cannot watch a socket (epoll_ctl)", errno);
  }
}

}  // namespace

std::shared_ptr<TcpListener> TcpListener::of(const TcpConfig& config, const std::string& congestion) {
  auto& all = ProcessWide<Listeners>::get();
  const Listeners::Key key(config.interface, config.master, config.ports.first, config.ports.last, congestion);
  const auto find = [&]() -> std::shared_ptr<TcpListener> {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto known = all.value.by_configuration.find(key);
    return known == all.value.by_configuration.end() ? nullptr : known->second.lock();
  };
  if (auto known = find(); known && known->places() < kMostPlaces) return known;
  // Made without the lock, since to look up the master may take long. If another thread makes one as well, both serve.
  auto made = std::make_shared<TcpListener>(config, congestion);
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.value.by_configuration[key] = made;
  return made;
}

TcpListener::TcpListener(const TcpConfig& config, const std::string& congestion) {
  const OwnAddresses wanted = own_addresses(config.interface, config.master);
  own_.paths = 0;
  std::string failures;
  for (size_t i = 0; i < wanted.addresses.size(); ++i) {
    try {
      listeners_.push_back(listen_at(wanted.addresses[i], config.ports, congestion));
    } catch (const SystemError& e) {
      // The address may belong to a family that is switched off, or may just be going away.
      failures += std::string(failures.empty() ? "" : "; ") + e.what();
      continue;
    }
    own_.addresses.push_back(local_address(listeners_.back().get()));
    if (i < wanted.paths) ++own_.paths;
  }
  own_.paths = std::max(own_.paths, size_t{1});
  if (own_.addresses.empty()) {
    throw Error("no address to wait for peers at: " + (failures.empty() ? "none found" : failures));
  }
  epoll_ = ProcessFd(with_descriptors([] { return ::epoll_create1(EPOLL_CLOEXEC); }));
  if (!epoll_.valid()) throw SystemError("cannot watch sockets (epoll)", errno);
  for (const ProcessFd& listener : listeners_) watch(epoll_, listener.get());
}

size_t TcpListener::places() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return places_.size();
}

void TcpListener::keep_spares() {
  while (spares_.size() < kSpares) {
    ProcessFd spare(with_descriptors([] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }));
    if (!spare.valid()) return;
    spares_.push_back(std::move(spare));
  }
}

bool TcpListener::give_up_spare() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (spares_.empty()) return false;
  spares_.pop_back();
  return true;
}

std::shared_ptr<TcpListener::Place> TcpListener::open(std::function<void()> wake) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keep_spares();
  const auto place = std::make_shared<Place>(++last_number_, std::move(wake));
  places_.emplace(place->number, place);
  return place;
}

void TcpListener::admit(Place& place, const TcpSelf& self) {
  const std::lock_guard<std::mutex> lock(mutex_);
  place.self = self;
  place.knows_self = true;
}

std::vector<TcpHandshake> TcpListener::take_arrived(Place& place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  place.has_arrived.store(false, std::memory_order_release);
  return std::exchange(place.arrived, {});
}

void TcpListener::close(const std::shared_ptr<Place>& place) noexcept {
  if (!owner_.is_here()) return;  // the lock may be held by a thread that the child does not have
  const std::lock_guard<std::mutex> lock(mutex_);
  places_.erase(place->number);
  place->arrived.clear();
  keep_spares();
  if (!places_.empty()) {
    attend();
  } else if (end_.valid()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(end_.get(), &one, sizeof(one));
  }
}

void TcpListener::attend() noexcept {
  if (end_.valid()) return;
  try {
    end_ = ProcessFd(with_descriptors([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }));
    if (!end_.valid()) return;
    watch(epoll_, end_.get());
    start_background_thread("ours_listener", [self = shared_from_this()] { self->serve_until_closed(); });
  } catch (const std::exception&) {
    end_.reset();  // peers hear of it when this process makes its next call between nodes
  }
}

void TcpListener::serve_until_closed() {
  // What peers say takes a moment, and those for whom there is no room have to wait.
  constexpr std::chrono::milliseconds kPause{10};
  for (;;) {
    epoll_event event{};
    ::epoll_wait(epoll_.get(), &event, 1, is_busy() ? static_cast<int>(kPause.count()) : -1);
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(end_.get(), &count, sizeof(count));  // which only this thread closes
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (places_.empty()) return end_.reset();
    }
    bool pauses = false;
    try {
      pauses = serve() != 0;
    } catch (const std::exception&) {
      pauses = true;
    }
    if (pauses || is_busy()) std::this_thread::sleep_for(kPause);
  }
}

int TcpListener::serve() {
  const std::lock_guard<std::mutex> lock(mutex_);
  busy_.store(true, std::memory_order_release);  // should something throw, the next who looks goes on
  queue_left_ = false;
  int lack = 0;
  for (const ProcessFd& listener : listeners_) {
    if (lack == 0 && !queue_left_) lack = accept_from_queue(listener.get());
  }
  const auto now = Clock::now();
  for (auto one = strangers_.begin(); one != strangers_.end();) {
    one = advance(*one, now) ? std::next(one) : strangers_.erase(one);
  }
  busy_.store(queue_left_ || !strangers_.empty(), std::memory_order_release);
  return lack;
}

int TcpListener::accept_from_queue(int listener) {
  while (make_room()) {
    ProcessFd fd = accept_from(listener);
    if (fd.valid()) {
      tune_connection(fd.get());
      watch(epoll_, fd.get());
      strangers_.push_back({TcpHandshake(std::move(fd)), Clock::now()});
      continue;
    }
    if (errno == EAGAIN) return 0;
    const int error = errno;
    const bool is_lack = is_lack_of_descriptors(error);
    if (!is_lack && error != ENOBUFS && error != ENOMEM) continue;  // that connection ended before it was accepted
    queue_left_ = true;
    return is_lack ? error : 0;
  }
  queue_left_ = true;
  return 0;
}

void TcpListener::cut_off(const Stranger& stranger) {
  const linger reset{1, 0};
  ::setsockopt(stranger.handshake.fd(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
}

bool TcpListener::make_room() {
  if (strangers_.size() < kMostStrangers) return true;
  size_t room = kMostStrangers;
  for (const auto& [number, place] : places_) room += place->self.most_connections();
  if (strangers_.size() < room) return true;
  if (Clock::now() < strangers_.front().arrived + kTimeToSpeak) return false;
  cut_off(strangers_.front());
  strangers_.pop_front();
  return true;
}

bool TcpListener::advance(Stranger& stranger, Clock::time_point now) {
  TcpHandshake& handshake = stranger.handshake;
  if (handshake.advance() == TcpHandshake::State::Broken) return false;
  if (!handshake.awaits_mesh()) {
    if (now <= stranger.arrived + kStrangerLimit) return true;
    cut_off(stranger);
    return false;
  }
  const auto place = places_.find(handshake.mesh());
  if (place == places_.end()) return false;
  if (!place->second->knows_self) return true;
  handshake.meet(place->second->self);
  if (!handshake.awaits_verdict()) return false;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, handshake.fd(), nullptr);
  place->second->arrived.push_back(std::move(handshake));
  place->second->has_arrived.store(true, std::memory_order_release);
  place->second->wake();
  return false;
}

bool TcpListener::send_stranger_away() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (strangers_.empty()) return false;
  cut_off(strangers_.front());
  strangers_.pop_front();
  return true;
}

}  // namespace ours
