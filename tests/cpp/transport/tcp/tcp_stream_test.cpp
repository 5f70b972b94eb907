#include "transport/tcp/tcp_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "common/error.h"
#include "support/testing.h"

// One connection whose other end writes pieces of any size.

namespace ours::testing {
namespace {

class Strict final : public TcpStream::Handler {
 public:
  void check_data(int, const FrameHeader&) override { ++headers; }
  void receive_by_engine(int, const FrameHeader&, void*, size_t*) override { throw Error("there is no engine here"); }
  void hear(int, const FrameHeader&, const std::string&) override { throw Error("no control here"); }
  void garbage(int, const char* fault) override { throw Error(fault); }
  size_t headers = 0;
};

FrameHeader header_of(size_t part, size_t bytes) {
  FrameHeader header;
  header.part = static_cast<uint32_t>(part);
  header.bytes = header.total = bytes;
  return header;
}

std::vector<std::byte> payload_of(size_t part, size_t bytes) {
  std::vector<std::byte> payload(bytes);
  for (size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::byte>(part * 31 + i * 7 + i / 251);
  return payload;
}

/// A data stream, and the plain socket at the other end of its connection.
struct Connection {
  Connection() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    stream.open(ProcessFd(ends[0]));
    far = ProcessFd(ends[1]);
  }

  /// Writes as much as there is room for, and reports it as epoll does: once for new data.
  size_t write(const std::byte* data, size_t bytes) {
    const ssize_t sent = bytes == 0 ? 0 : ::send(far.get(), data, bytes, MSG_NOSIGNAL);
    if (sent > 0) stream.set_ready(true, false);
    return sent > 0 ? static_cast<size_t>(sent) : 0;
  }

  Strict handler;
  TcpStream stream{1, true, handler};
  ProcessFd far;
};

std::vector<std::byte> frame_of(size_t part, size_t bytes) {
  const FrameHeader header = header_of(part, bytes);
  const auto* begin = reinterpret_cast<const std::byte*>(&header);
  std::vector<std::byte> frame(begin, begin + sizeof(header));
  const std::vector<std::byte> payload = payload_of(part, bytes);
  frame.insert(frame.end(), payload.begin(), payload.end());
  return frame;
}

struct Posted {
  std::vector<std::byte> to;
  size_t done = 0;
};

/// The bytes of the messages arrive in pieces of `piece` bytes; `ahead` receives are posted ahead of what has come.
void receive_in_pieces(const std::vector<size_t>& lengths, size_t piece, size_t ahead) {
  std::vector<std::byte> wire;
  for (size_t m = 0; m < lengths.size(); ++m) {
    const std::vector<std::byte> frame = frame_of(m, lengths[m]);
    wire.insert(wire.end(), frame.begin(), frame.end());
  }

  Connection connection;
  TcpStream& stream = connection.stream;
  std::deque<Posted> posted;
  const auto arrived = [&] {
    return static_cast<size_t>(
        std::count_if(posted.begin(), posted.end(), [](const Posted& p) { return p.done == 1; }));
  };
  for (size_t at = 0; arrived() < lengths.size();) {
    while (posted.size() < lengths.size() && posted.size() < arrived() + ahead) {
      const size_t m = posted.size();
      posted.push_back({std::vector<std::byte>(lengths[m]), 0});
      stream.post_receive(header_of(m, lengths[m]), posted.back().to.data(), &posted.back().done);
    }
    const size_t taken = connection.write(wire.data() + at, std::min(piece, wire.size() - at));
    at += taken;
    bool moved = false;
    while (stream.ready()) moved = stream.advance() || moved;
    CHECK(moved || taken > 0);
  }
  CHECK(connection.handler.headers == lengths.size());
  for (size_t m = 0; m < lengths.size(); ++m) CHECK(posted[m].to == payload_of(m, lengths[m]));
}

TEST(messages_of_all_lengths_arrive_in_pieces_of_any_size) {
  // Around the length from which the stream reads a message straight to its place, before and after shorter ones.
  constexpr size_t kLong = 32 * 1024;
  const std::vector<size_t> lengths = {0,         1,         kLong, 3 * kLong, 100, kLong - 1, kLong + 1, 0,
                                       2 * kLong, 4 * kLong, 87,    88,        89,  5 * kLong, kLong,     7};
  constexpr size_t kHeader = sizeof(FrameHeader);
  for (const size_t piece : {size_t{53}, kHeader - 1, kHeader, kHeader + 1, kLong - 1, kLong + kHeader, 16 * kLong}) {
    for (const size_t ahead : {size_t{1}, size_t{2}, lengths.size()}) receive_in_pieces(lengths, piece, ahead);
  }
}

TEST(a_message_that_is_not_the_next_one_is_refused) {
  for (const size_t bytes : {size_t{8}, size_t{100000}}) {
    Connection connection;
    std::vector<std::byte> to(bytes);
    size_t done = 0;
    connection.stream.post_receive(header_of(1, bytes), to.data(), &done);
    const std::vector<std::byte> other = frame_of(2, bytes);
    CHECK(connection.write(other.data(), other.size()) > sizeof(FrameHeader));
    CHECK_CONTAINS(CHECK_THROWS(Error, connection.stream.advance()), "not the one that follows");
    CHECK(done == 0);
    CHECK(to == std::vector<std::byte>(bytes));
  }
}

}  // namespace
}  // namespace ours::testing
