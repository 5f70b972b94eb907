#include <sys/socket.h>

#include <memory>

#include "collectives/tcp/tcp_messages.h"
#include "fuzz/parser.h"
#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

// A rank that knows the secret and turns hostile after the handshake: whatever it sends, the other rank's call ends in
// time, with its result or with an error. The first byte says which call that is; the next two bytes say how many bytes
// come on the connection for control; the rest comes on that for data.

namespace ours::fuzz {
namespace {

using testing::MapKeys;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kTimeout{30};
constexpr uint8_t kCalls = 7;
constexpr size_t kCount = 64;

/// Rank 1 of a group, and the connections of its rank 0.
class Pair {
 public:
  Pair() {
    TcpTerms terms;
    terms.secret = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
    TcpCard card;
    card.machine = machine_id();
    card.addresses = {SocketAddress::parse("127.0.0.1")->with_port(9)};
    keys_->set(kTermsKey, terms.text());
    keys_->set(card_key(0), card.text());
    mesh_ = testing::join_mesh(1, 2, keys_);
    self_.size = 2;
    self_.streams = terms.plan.streams + 1;
    self_.secret = terms.secret;
    for (int stream = 0; stream < self_.streams; ++stream) connect(stream);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  ~Pair() {
    mesh_->leave();
    // With a reset, so that the system keeps nothing of the connection.
    const linger now{1, 0};
    for (const ProcessFd& fd : fds_) ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  }

  void send(size_t stream, const Bytes& bytes) {
    if (::send(fds_[stream].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) throw Error("it was cut off");
  }

  /// What rank 1 has sent.
  Bytes received(size_t stream) {
    Bytes all(1 << 16, '\0');
    const ssize_t got = ::recv(fds_[stream].get(), all.data(), all.size(), 0);
    all.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return all;
  }

  const std::shared_ptr<TcpMesh>& mesh() const { return mesh_; }

 private:
  void connect(int stream) {
    TcpHandshake handshake(begin_connecting(mesh_->card().addresses[0]), self_, 1, mesh_->card().mesh, stream);
    const Deadline patience = Deadline::after(std::chrono::seconds(10));
    while (handshake.advance() == TcpHandshake::State::Going && !patience.passed()) mesh_->look();
    require(handshake.advance() == TcpHandshake::State::Done, "a rank that knows the secret is let in");
    fds_.push_back(handshake.take_fd());
  }

  std::shared_ptr<MapKeys> keys_ = std::make_shared<MapKeys>();
  std::shared_ptr<TcpMesh> mesh_;
  TcpSelf self_;
  std::vector<ProcessFd> fds_;
};

void receive_message(const std::shared_ptr<TcpMesh>& mesh) {
  const auto messages = make_tcp_point_to_point(mesh, mesh);
  std::vector<float> data(kCount);
  const auto transfer = messages->recv({data.data(), kCount * sizeof(float)}, DType::Float32, 0, 0,
                                       std::make_shared<TransferLimit>(kTimeout), nullptr);
  messages->wait(*transfer);
  const std::exception_ptr error = transfer->error();
  messages->close();
  messages->wait_closed(std::chrono::seconds(10));
  if (error) std::rethrow_exception(error);
}

void call(uint8_t which, const std::shared_ptr<TcpMesh>& mesh) {
  if (which % kCalls == 6) return receive_message(mesh);
  TcpGroup group(mesh);
  std::vector<float> data(kCount, 1.0f), all(2 * kCount), other(kCount);
  const auto of = [](Op op) { return testing::call_of(op, DType::Float32, 1, kTimeout); };
  switch (which % kCalls) {
    case 0:
      return testing::sum(group, 1, data, kTimeout);
    case 1:
      return testing::barrier(group, 1, kTimeout);
    case 2:
      group.broadcast(of(Op::Broadcast), testing::span(data), 0);
      return;
    case 3:
      group.all_to_all(of(Op::AllToAll), {testing::const_span(data), testing::const_span(data)},
                       {testing::span(other), testing::span(all)});
      return;
    case 4:
      group.reduce_scatter(of(Op::ReduceScatter), {all.data(), all.data() + kCount}, {kCount, kCount}, data.data(),
                           Reduction{ReduceKind::Sum, 2, 1.0});
      return;
    default:
      return group.monitored_barrier(of(Op::MonitoredBarrier), true);
  }
}

Bytes input_of(uint8_t which, const Bytes& control, const Bytes& data) {
  return Bytes(1, static_cast<char>(which)) + bytes_of(static_cast<uint16_t>(control.size())) + control + data;
}

/// Frames without those that tell of time passing and of a failure.
Bytes of_a_call(const Bytes& control) {
  Bytes kept;
  Source source(control);
  while (!source.empty()) {
    const auto header = source.value<FrameHeader>();
    const Bytes payload = source.take(header.bytes);
    const bool tells = header.kind == FrameKind::Failure || header.kind == FrameKind::Waiting;
    if (!tells) kept += bytes_of(header) + payload;
  }
  return kept;
}

/// In most calls of two ranks, one sends what the other does. So what rank 1 sends is recorded, and sent to it.
Bytes recorded(uint8_t which) {
  Pair pair;
  try {
    call(which, pair.mesh());
  } catch (const Error&) {
    // Nobody answered.
  }
  return input_of(which, of_a_call(pair.received(0)), pair.received(1));
}

std::vector<Seed> seeds() {
  FrameHeader message;
  message.call = 1;
  message.total = message.bytes = kCount * sizeof(float);
  message.signature[4] = static_cast<uint8_t>(DType::Float32);
  FrameHeader failure;
  failure.kind = FrameKind::Failure;
  failure.bytes = 6;
  FrameHeader bye;
  bye.kind = FrameKind::Bye;
  return {{"all_reduce", recorded(0)},
          {"barrier", recorded(1)},
          {"broadcast", recorded(2)},
          {"all_to_all", recorded(3)},
          {"reduce_scatter", recorded(4)},
          {"monitored_barrier", recorded(5)},
          {"message", input_of(6, "", bytes_of(message) + Bytes(message.bytes, 'x'))},
          {"failure", input_of(0, bytes_of(failure) + "enough", "")},
          {"bye", input_of(1, bytes_of(bye), "")}};
}

void parse(const Bytes& input) {
  Source source(input);
  const uint8_t which = source.byte();
  const Bytes control = source.take(source.value<uint16_t>());
  Pair pair;
  pair.send(0, control);
  pair.send(1, source.rest());
  const auto start = Clock::now();
  try {
    call(which, pair.mesh());
  } catch (const Error& e) {
    require(e.what()[0] != '\0', "an error says something");
  }
  require(Clock::now() - start < kTimeout + std::chrono::seconds(10), "a call ends in time");
}

const Registration registration("peer", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
