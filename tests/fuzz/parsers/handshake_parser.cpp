#include <sys/socket.h>

#include "common/fd.h"
#include "fuzz/parser.h"
#include "transport/tcp/tcp_handshake.h"

// A stranger at the other end of a new connection. The first byte says which end this rank has, and how many bytes come
// at a time.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  const Bytes challenge = bytes_of(Challenge{});
  Hello hello;
  hello.from = 1;
  return {{"hello", '\0' + bytes_of(hello)},
          {"hello_in_pieces", '\x0e' + bytes_of(hello)},
          {"challenge_and_welcome", '\1' + challenge + bytes_of(Welcome{})},
          {"scanner", Bytes("\0GET / HTTP/1.1\r\nHost: node1\r\nUser-Agent: scanner/1.0\r\n\r\n", 58)}};
}

void parse(const Bytes& input) {
  static const TcpSelf kSelf{0, 2, 2, "host", 1, {1, 2, 3}};
  Source source(input);
  const uint8_t how = source.byte();
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) return;
  ProcessFd own(ends[0]);
  const Fd far(ends[1]);
  const bool accepts = (how & 1) == 0;
  TcpHandshake handshake = accepts ? TcpHandshake(std::move(own)) : TcpHandshake(std::move(own), kSelf, 1, 1, 0);
  auto state = handshake.advance();
  const size_t piece = 1 + (how >> 1);
  while (state == TcpHandshake::State::Going && !source.empty()) {
    const Bytes bytes = source.take(piece == 128 ? input.size() : piece);
    if (::send(far.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) break;
    state = handshake.advance();
    if (handshake.awaits_mesh()) handshake.meet(kSelf);
  }
  state = handshake.advance();
  require(state != TcpHandshake::State::Done && !handshake.awaits_verdict(), "no stranger is let in");
  require(state != TcpHandshake::State::Broken || !handshake.reason().empty(), "there is a reason");
}

const Registration registration("handshake", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
