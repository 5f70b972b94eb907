#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "common/deadline.h"
#include "common/process_fd.h"
#include "transport/tcp/tcp_listener.h"
#include "transport/tcp/tcp_stream.h"

struct epoll_event;

namespace ours {

/// Watches the sockets of a mesh, and lets a thread sleep until something happens on one of them. Used with the mesh's
/// lock held; only wake() may be called without it. It takes no descriptor before it is used, nor after close_unused(),
/// and those that the listener keeps if there are no others.
class TcpPoller {
 public:
  void watch_listener(std::shared_ptr<TcpListener> listener) { listener_ = std::move(listener); }
  void watch_handshake(int fd);
  /// Watches the socket of a completed handshake as the stream's; from now on the stream is told when it can read or
  /// write.
  void watch_stream(TcpStream& stream);

  /// Takes in all events, without waiting.
  void poll();
  /// Waits at most `limit` until something happens, and releases the lock meanwhile.
  void sleep(std::unique_lock<std::mutex>& lock, Clock::duration limit);
  /// Ends the current sleep, or the next one.
  void wake() noexcept;

  /// There is nothing to watch for now: frees the descriptors, unless a thread sleeps.
  void close_unused() noexcept;

  /// Whether the listener had an event since the flag was cleared; true at first.
  bool listener_moved = true;
  bool handshakes_moved = false;

 private:
  /// Throws SystemError.
  void open();
  /// `token` comes back with each event: the stream, or a member of this that stands for what it is.
  void watch(int operation, int fd, uint32_t events, void* token);
  void apply(const epoll_event* events, int count);
  /// With waking_.
  void ring();

  std::shared_ptr<TcpListener> listener_;
  ProcessFd epoll_;
  ProcessFd wake_;
  int sleepers_ = 0;
  std::mutex waking_;    // guards all below, and wake_ with the mesh's lock
  bool wakes_ = false;   ///< wake_ can be used
  bool called_ = false;  ///< wake() has been called
};

}  // namespace ours
