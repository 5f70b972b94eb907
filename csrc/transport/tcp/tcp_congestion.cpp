#include "transport/tcp/tcp_congestion.h"

#include <linux/tcp.h>  // glibc's does not know the shortest round trip
#include <netinet/in.h>
#include <sys/socket.h>

#include <fstream>
#include <sstream>

#include "transport/tcp/tcp_socket.h"

namespace ours {

namespace {

std::string line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool has_word(const std::string& words, const std::string& word) {
  std::istringstream in(words);
  for (std::string each; in >> each;) {
    if (each == word) return true;
  }
  return false;
}

/// The shortest round trip that a connection has seen within some minutes; very long if it has seen none.
std::chrono::microseconds shortest_round_trip(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_min_rtt == 0) {
    return std::chrono::microseconds::max();
  }
  return std::chrono::microseconds(info.tcpi_min_rtt);
}

}  // namespace

TcpCongestion::System TcpCongestion::System::here() {
  return {line_of("/proc/sys/net/ipv4/tcp_congestion_control"),
          line_of("/proc/sys/net/ipv4/tcp_allowed_congestion_control")};
}

TcpCongestion::TcpCongestion(const std::string& asked, const System& system, std::chrono::microseconds near)
    : longest_(near), near_(asked), far_(asked) {
  if (!asked.empty() || system.usual.rfind("bbr", 0) != 0) return;
  for (const char* name : {"cubic", "reno"}) {
    if (!has_word(system.allowed, name)) continue;
    near_ = name;
    far_ = system.usual;
    return;
  }
}

bool TcpCongestion::settle(int fd) const {
  if (near_ == far_) return true;
  const std::string& chosen = choose(shortest_round_trip(fd));
  // If this fails after all, the connection keeps what it has.
  use_congestion_control(fd, chosen);
  return &chosen == &near_;
}

}  // namespace ours
