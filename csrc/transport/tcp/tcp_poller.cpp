#include "transport/tcp/tcp_poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/descriptors.h"
#include "common/error.h"

namespace ours {

namespace {

constexpr uint32_t kBothWays = EPOLLIN | EPOLLOUT | EPOLLRDHUP;

using Events = std::array<epoll_event, 64>;

}  // namespace

void TcpPoller::open() {
  if (epoll_.valid()) return;
  const auto make = [this](int (*create)()) {
    int fd = with_descriptors(create);
    while (fd < 0 && is_lack_of_descriptors(errno) && listener_ && listener_->give_up_spare()) fd = create();
    return ProcessFd(fd);
  };
  epoll_ = make([] { return ::epoll_create1(EPOLL_CLOEXEC); });
  if (epoll_.valid()) wake_ = make([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
  if (!wake_.valid()) {
    const int error = errno;
    epoll_.reset();
    throw SystemError("cannot watch sockets (epoll, eventfd)", error);
  }
  watch(EPOLL_CTL_ADD, wake_.get(), EPOLLIN, &wake_);
  if (listener_) watch(EPOLL_CTL_ADD, listener_->fd(), EPOLLIN, &listener_moved);
  listener_moved = true;
  const std::lock_guard<std::mutex> lock(waking_);
  wakes_ = true;
  if (called_) ring();
}

void TcpPoller::close_unused() noexcept {
  if (sleepers_ > 0) return;
  const std::lock_guard<std::mutex> lock(waking_);
  wakes_ = called_ = false;
  wake_.reset();
  epoll_.reset();
}

void TcpPoller::watch_handshake(int fd) {
  open();
  watch(EPOLL_CTL_ADD, fd, kBothWays, &handshakes_moved);
}

void TcpPoller::watch_stream(TcpStream& stream) {
  // An earlier event has been lost.
  stream.set_ready(true, true);
  watch(EPOLL_CTL_MOD, stream.fd(), kBothWays, &stream);
}

void TcpPoller::watch(int operation, int fd, uint32_t events, void* token) {
  epoll_event event{};
  event.data.ptr = token;
  // Edge triggered: streams remember what they may do until the system refuses it; each wake-up is an event of its
  // own, so the counter need not be read; and connections that cannot be accepted yet do not end every sleep.
  event.events = events | EPOLLET;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) {
    throw SystemError("cannot watch a socket (epoll_ctl)", errno);
  }
}

void TcpPoller::apply(const epoll_event* events, int count) {
  for (int i = 0; i < count; ++i) {
    void* const token = events[i].data.ptr;
    const uint32_t what = events[i].events;
    if (token == &listener_moved) {
      listener_moved = true;
    } else if (token == &handshakes_moved) {
      handshakes_moved = true;
    } else if (token != &wake_) {
      // The stream finds out about an error when it reads.
      static_cast<TcpStream*>(token)->set_ready((what & ~EPOLLOUT) != 0,
                                                (what & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0);
    }
  }
}

void TcpPoller::poll() {
  open();
  Events events;
  apply(events.data(), ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0));
}

void TcpPoller::sleep(std::unique_lock<std::mutex>& lock, Clock::duration limit) {
  open();
  const auto ms = std::max<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(limit).count(), 0);
  Events events;
  ++sleepers_;
  lock.unlock();
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), static_cast<int>(ms));
  lock.lock();
  --sleepers_;
  apply(events.data(), count);
}

void TcpPoller::wake() noexcept {
  const std::lock_guard<std::mutex> lock(waking_);
  called_ = true;
  if (wakes_) ring();
}

void TcpPoller::ring() {
  const uint64_t one = 1;
  // This can only fail after 2^64 - 1 wake-ups.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

}  // namespace ours
