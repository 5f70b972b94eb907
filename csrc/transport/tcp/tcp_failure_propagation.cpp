#include "transport/tcp/tcp_failure_propagation.h"

#include <exception>
#include <optional>
#include <thread>

#include "common/error.h"
#include "common/whole_characters.h"

namespace ours {

TcpFailurePropagation::TcpFailurePropagation(const GroupFailure& failure, TcpConnections& connections,
                                             TcpPoller& poller, int own_rank, int size)
    : failure_(failure), connections_(connections), poller_(poller), told_(static_cast<size_t>(size)) {
  told_[static_cast<size_t>(own_rank)] = true;
}

void TcpFailurePropagation::tell() {
  FrameHeader header;
  header.kind = FrameKind::Failure;
  header.detail = static_cast<uint8_t>(failure_.kind());
  std::string message = failure_.message();
  message.resize(whole_characters(message, kMaxFailureBytes));
  connections_.end_parking();
  connections_.for_each_control([&](int rank, TcpStream& control) {
    if (has_told(rank)) return;
    told_[static_cast<size_t>(rank)] = true;
    control.post_send(header, message);
    control.send_now();
  });
}

void TcpFailurePropagation::run(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& left) {
  constexpr std::chrono::milliseconds kLongestSleep{100};
  // For this long after this rank has left, peers that connect may still learn why: they are about to notice that it
  // has.
  constexpr std::chrono::seconds kAfterword{3};
  std::optional<Clock::time_point> end;
  while (!end || Clock::now() < *end) {
    try {
      connections_.advance_handshakes();
      tell();
      connections_.for_each_control([](int, TcpStream& control) { control.send_now(); });
    } catch (const std::exception&) {
      // That peer cannot be told any more.
    }
    if (left.load() && all_know()) return;
    if (left.load() && !end) end = Clock::now() + kAfterword;
    try {
      poller_.sleep(lock, kLongestSleep);
    } catch (const SystemError&) {
      // There is no descriptor by which to wait.
      lock.unlock();
      std::this_thread::sleep_for(kLongestSleep);
      lock.lock();
    }
  }
}

bool TcpFailurePropagation::all_know() {
  for (const bool told : told_) {
    if (!told) return false;
  }
  bool sent = true;
  connections_.for_each_control([&](int, TcpStream& control) { sent = sent && !control.has_sends(); });
  return sent;
}

}  // namespace ours
