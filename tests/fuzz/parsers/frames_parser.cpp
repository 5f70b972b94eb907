#include <sys/socket.h>

#include <algorithm>
#include <list>

#include "common/error.h"
#include "common/fd.h"
#include "fuzz/parser.h"
#include "transport/tcp/tcp_stream.h"

// A peer that has been let in sends what it likes on one connection. The first byte says whether that is a connection
// for data, how many bytes come at a time, and whether this rank has posted a receive before.

namespace ours::fuzz {
namespace {

constexpr uint8_t kData = 1, kAhead = 2, kInPieces = 4;

FrameHeader data_header(uint32_t part, uint64_t bytes) {
  FrameHeader header;
  header.call = 1;
  header.part = part;
  header.bytes = header.total = bytes;
  return header;
}

Bytes control(FrameKind kind, const Bytes& payload) {
  FrameHeader header;
  header.kind = kind;
  header.bytes = payload.size();
  return bytes_of(header) + payload;
}

std::vector<Seed> seeds() {
  const Bytes data = bytes_of(data_header(0, 16)) + Bytes(16, 'x') + bytes_of(data_header(1, 300)) + Bytes(300, 'y');
  FrameHeader by_engine = data_header(2, 1 << 20);
  by_engine.engine_number = 1;
  const Bytes talk = control(FrameKind::Agree, "") + control(FrameKind::Failure, "enough") +
                     control(FrameKind::Refused, "why") + control(FrameKind::Waiting, Bytes(8, '\1')) +
                     control(FrameKind::Monitor, "") + control(FrameKind::Bye, "a reason");
  return {{"data", static_cast<char>(kData) + data},
          {"data_in_pieces", static_cast<char>(kData | kAhead | kInPieces | 53 << 3) + data},
          {"data_by_engine", static_cast<char>(kData) + bytes_of(by_engine) + data},
          {"control", '\0' + talk},
          {"control_in_pieces", static_cast<char>(kInPieces | 7 << 3) + talk}};
}

/// Refuses what the endpoint would refuse, and checks the rest.
class Listener final : public TcpStream::Handler {
 public:
  void check_data(int, const FrameHeader& header) override {
    require(header.bytes <= header.total, "a part is no longer than the whole");
  }
  void receive_by_engine(int, const FrameHeader& header, void*, size_t* done) override {
    require(header.engine_number != 0, "an engine has a number");
    ++*done;
  }
  void hear(int, const FrameHeader& header, const std::string& payload) override {
    require(payload.size() == header.bytes && payload.size() <= kMaxFailureBytes, "what is heard is short");
  }
  void garbage(int, const char* fault) override { throw Error(fault); }
};

struct Received {
  FrameHeader header;
  std::vector<std::byte> bytes;
  size_t done = 0;
};

/// A stream, and what has arrived on it.
class Connection {
 public:
  Connection(bool data, const Bytes& sent) : stream_(1, data, listener_), sent_(sent) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) throw Error("no sockets");
    stream_.open(ProcessFd(ends[0]));
    far_ = Fd(ends[1]);
  }

  void post(const FrameHeader& header) {
    // A message that is longer than all that is sent cannot come in full.
    if (header.engine_number == 0 && header.bytes > sent_.size()) throw Error("too long");
    received_.push_back({header, std::vector<std::byte>(following_bytes(header))});
    stream_.post_receive(header, received_.back().bytes.data(), &received_.back().done);
  }

  void send(const Bytes& bytes) {
    if (::send(far_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) throw Error("the stream is closed");
    advance();
  }

  void end() {
    far_.reset();
    advance();
    require(stream_.ended() || stream_.early() != nullptr, "an end is noticed");
  }

  /// What has arrived is what was sent.
  void check() const {
    size_t at = 0;
    for (const Received& one : received_) {
      if (one.done == 0) return;
      at += sizeof(FrameHeader);
      require(at + one.bytes.size() <= sent_.size(), "only what was sent arrives");
      const auto* begin = reinterpret_cast<const std::byte*>(sent_.data()) + at;
      require(std::equal(one.bytes.begin(), one.bytes.end(), begin), "what arrives is what was sent");
      at += one.bytes.size();
    }
  }

 private:
  void advance() {
    stream_.set_ready(true, false);
    size_t turns = 0;
    while (stream_.ready() || stream_.early() != nullptr) {
      require(++turns < 10000, "a stream that is ready gets on");
      if (const FrameHeader* const early = stream_.early()) post(*early);
      stream_.advance();
    }
  }

  Listener listener_;
  TcpStream stream_;
  const Bytes& sent_;
  Fd far_;
  std::list<Received> received_;
};

void parse(const Bytes& input) {
  Source source(input);
  const uint8_t how = source.byte();
  const Bytes sent = source.rest();
  Connection connection((how & kData) != 0, sent);
  if ((how & (kData | kAhead)) == (kData | kAhead) && sent.size() >= 16) connection.post(data_header(0, 16));
  const size_t piece = (how & kInPieces) != 0 ? 1 + (how >> 3) * size_t{5} : std::max<size_t>(sent.size(), 1);
  try {
    for (size_t at = 0; at < sent.size(); at += piece) connection.send(sent.substr(at, piece));
    connection.end();
  } catch (const Error&) {
    connection.check();
    throw;
  }
  connection.check();
}

const Registration registration("frames", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
