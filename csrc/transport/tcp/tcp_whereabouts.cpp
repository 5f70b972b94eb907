#include "transport/tcp/tcp_whereabouts.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "common/background_thread.h"
#include "common/deadline.h"
#include "common/error.h"
#include "common/process_wide.h"
#include "common/whereabouts.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_whereabouts_wire.h"

namespace ours {

namespace {

/// Where this process is asked, once it can be.
struct OwnAnswers {
  std::optional<AskedPeer> self;

  void in_child() { self.reset(); }
};

/// Takes the next packet at a socket; false if there is none of the right kind.
template <class Message>
bool receive(const ProcessFd& fd, Message& message, sockaddr_storage& from, socklen_t& length) {
  length = sizeof(from);
  const ssize_t bytes = ::recvfrom(fd.get(), &message, sizeof(message), MSG_DONTWAIT | MSG_TRUNC,
                                   reinterpret_cast<sockaddr*>(&from), &length);
  return bytes == static_cast<ssize_t>(sizeof(message));
}

void answer_questions(const std::vector<ProcessFd>& sockets, const SipKey& key) {
  std::vector<pollfd> polled;
  polled.reserve(sockets.size());
  for (const ProcessFd& socket : sockets) polled.push_back({socket.get(), POLLIN, 0});
  while (::poll(polled.data(), polled.size(), -1) >= 0 || errno == EINTR) {
    for (const ProcessFd& socket : sockets) {
      RollQuestion question;
      sockaddr_storage from{};
      socklen_t length = 0;
      if (!receive(socket, question, from, length) || !is_sound(question, key)) continue;
      std::string text;
      try {
        text = own_place();
      } catch (const std::exception&) {
        continue;  // out of memory, say
      }
      const RollAnswer answer = answer_to(question, key, text);
      ::sendto(socket.get(), &answer, sizeof(answer), MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(&from), length);
    }
  }
}

/// Sends a question to all addresses of a process, as only some may be reached from here.
bool send(const std::array<ProcessFd, 2>& sockets, const AskedPeer& peer, const RollQuestion& question) {
  bool sent = false;
  for (const SocketAddress& address : peer.addresses) {
    const ProcessFd& socket = sockets[address.family() == AF_INET ? 0 : 1];
    sent =
        ::sendto(socket.get(), &question, sizeof(question), MSG_DONTWAIT, address.data(), address.size()) > 0 || sent;
  }
  return sent;
}

}  // namespace

AskedPeer own_tcp_whereabouts(const std::vector<SocketAddress>& addresses, const PortRange& ports) {
  auto& own = ProcessWide<OwnAnswers>::get();
  {
    const std::lock_guard<std::mutex> lock(own.mutex);
    if (own.value.self) return *own.value.self;
  }
  try {
    // Without the lock, because each ProcessFd takes another one of this kind.
    AskedPeer self{draw_nonce(), {}};
    const auto sockets = std::make_shared<std::vector<ProcessFd>>();
    for (const SocketAddress& address : addresses) {
      sockets->push_back(receive_at(address, ports));
      self.addresses.push_back(local_address(sockets->back().get()));
    }
    const std::lock_guard<std::mutex> lock(own.mutex);
    if (!own.value.self) {
      start_background_thread("ours_where_tcp", [sockets, key = self.key] { answer_questions(*sockets, key); });
      own.value.self = self;
    }
    return *own.value.self;
  } catch (const std::exception&) {
    // No descriptor, port or thread: nobody can ask, unless another thread has just succeeded.
    const std::lock_guard<std::mutex> lock(own.mutex);
    return own.value.self.value_or(AskedPeer());
  }
}

std::vector<std::string> ask_tcp_whereabouts(const std::vector<AskedPeer>& peers) {
  std::vector<std::string> texts(peers.size());
  const std::array<ProcessFd, 2> sockets{ProcessFd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
                                         ProcessFd(::socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0))};
  const Nonce nonce = draw_nonce();
  size_t awaited = 0;
  for (size_t i = 0; i < peers.size(); ++i) {
    if (send(sockets, peers[i], question_to(peers[i].key, nonce, i))) {
      ++awaited;
    } else {
      texts[i] = "cannot be asked where it is";
    }
  }
  const Deadline deadline = Deadline::after(kAskingTime);
  while (awaited > 0 && !deadline.passed()) {
    pollfd polled[] = {{sockets[0].get(), POLLIN, 0}, {sockets[1].get(), POLLIN, 0}};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now());
    // The deadline may have passed since, and a negative time would be for ever.
    const int patience = std::max(0, static_cast<int>(left.count()) + 1);
    ::poll(polled, 2, patience);
    for (const ProcessFd& socket : sockets) {
      RollAnswer answer;
      sockaddr_storage from{};
      socklen_t length = 0;
      if (!receive(socket, answer, from, length) || !is_sound(answer, nonce, peers)) continue;
      std::string& text = texts[answer.to.number];
      if (text.empty()) --awaited;
      text = text_of(answer);
    }
  }
  for (std::string& text : texts) {
    if (text.empty()) {
      text = "did not say within " + std::to_string(kAskingTime.count()) +
             " ms where it is (it may be stopped, or unreachable by UDP, or a native function may keep Python's global "
             "lock)";
    }
  }
  return texts;
}

}  // namespace ours
