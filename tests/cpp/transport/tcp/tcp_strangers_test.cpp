#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "support/children.h"
#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

// Strangers that forge and replay handshakes, and so many of them that descriptors run out.

namespace ours::testing {
namespace {

using std::chrono::seconds;

TcpTerms terms_of(const std::shared_ptr<MapKeys>& keys) {
  return TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
}

ProcessFd connect_to(const std::shared_ptr<TcpMesh>& mesh) {
  ProcessFd fd = begin_connecting(mesh->card().addresses[0]);
  // Leaves no trace in the kernel: of thousands of connections in TIME_WAIT, some refuse a new one for seconds.
  const linger reset{1, 0};
  CHECK(::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) == 0);
  return fd;
}

/// All that comes at a socket by now.
std::string receive(int fd) {
  char bytes[4096];
  const ssize_t got = ::recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
  return {bytes, got > 0 ? static_cast<size_t>(got) : 0};
}

/// Says `words` on a new connection once it was challenged. Returns all that it heard until it was cut off.
std::string answer_challenge(const std::shared_ptr<TcpMesh>& mesh, const std::string& words) {
  const ProcessFd fd = connect_to(mesh);
  std::string heard;
  const Deadline patience = Deadline::after(seconds(10));
  bool cut_off = false;
  for (bool said = false; !cut_off && !patience.passed();) {
    mesh->look();
    heard += receive(fd.get());
    if (!said && heard.size() >= sizeof(Challenge)) {
      CHECK(::send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL) > 0);
      said = true;
    }
    pollfd polled{fd.get(), POLLRDHUP, 0};
    cut_off = ::poll(&polled, 1, 0) > 0;
  }
  CHECK(cut_off);
  return heard + receive(fd.get());
}

template <class Message>
std::string bytes_of(const Message& message) {
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

/// A handshake of two ends, between which the test carries what they say.
struct Overheard {
  std::string by_connecting, by_accepting;
};

/// Lets rank 1 connect to the mesh of rank 0, and listens in.
Overheard overhear(const std::shared_ptr<TcpMesh>& mesh, const TcpSelf& peer) {
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  TcpHandshake handshake(ProcessFd(ends[0]), peer, 0, mesh->card().mesh, 0);
  const ProcessFd near(ends[1]);
  const ProcessFd far = connect_to(mesh);
  Overheard heard;
  const auto carry = [](int from, int to, std::string& all) {
    const std::string words = receive(from);
    if (!words.empty()) CHECK(::send(to, words.data(), words.size(), MSG_NOSIGNAL) > 0);
    all += words;
  };
  const Deadline patience = Deadline::after(seconds(10));
  while (handshake.advance() == TcpHandshake::State::Going && !patience.passed()) {
    mesh->look();
    carry(far.get(), near.get(), heard.by_accepting);
    carry(near.get(), far.get(), heard.by_connecting);
  }
  CHECK(handshake.advance() == TcpHandshake::State::Done);
  CHECK_EQ(heard.by_connecting.size(), sizeof(Hello));
  return heard;
}

TEST(a_replayed_handshake_is_refused_at_both_ends) {
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = join_mesh(0, 2, keys);
  const TcpTerms terms = terms_of(keys);
  const TcpSelf peer{1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
  const Overheard heard = overhear(mesh, peer);
  // To the same rank, of which another connection is still free, and to that of a later group.
  for (const auto& other : {mesh, join_mesh(0, 2, std::make_shared<MapKeys>())}) {
    CHECK_EQ(answer_challenge(other, heard.by_connecting).size(), sizeof(Challenge));
  }
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  TcpHandshake handshake(ProcessFd(ends[0]), peer, 0, mesh->card().mesh, 0);
  const ProcessFd stranger(ends[1]);
  CHECK(::send(stranger.get(), heard.by_accepting.data(), heard.by_accepting.size(), MSG_NOSIGNAL) > 0);
  CHECK(handshake.advance() == TcpHandshake::State::Broken);
  CHECK_CONTAINS(handshake.reason(), "another group answers there");
}

TEST(none_of_a_thousand_forged_handshakes_is_accepted) {
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = join_mesh(0, 3, keys);
  std::mt19937_64 random(3);
  for (int i = 0; i < 1000; ++i) {
    Hello hello;
    hello.from = static_cast<uint32_t>(1 + i % 2);
    hello.stream = static_cast<uint32_t>(i / 2 % 2);
    hello.mesh = mesh->card().mesh;
    hello.proof = random();
    // A third knows the secret of another attempt, and a third sends what would follow as well.
    if (i % 3 == 0) hello.proof = proof_of(draw_nonce(), draw_nonce(), hello);
    const std::string after = i % 3 == 1 ? bytes_of(FrameHeader{}) : "";
    CHECK_EQ(answer_challenge(mesh, bytes_of(hello) + after).size(), sizeof(Challenge));
  }
  CHECK_EQ(mesh->connections(), 0u);
  CHECK_EQ(mesh->failure().message(), std::string());
}

TEST(hundreds_of_silent_strangers_keep_nobody_out) {
  const auto meshes = make_meshes(3);
  std::vector<ProcessFd> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(connect_to(meshes[static_cast<size_t>(i % 3)]));
  run_ranks(3, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(10000, 1.0f);
    sum(group, 0, data, seconds(30));
    CHECK_EQ(data[9999], 3.0f);
  });
}

TEST(strangers_that_use_up_the_descriptors_make_way_for_peers) {
  // In a child, whose limit is its own.
  CHECK(in_child([] {
    limit_descriptors(400, 400);
    const auto keys = std::make_shared<MapKeys>();
    const auto mesh = join_mesh(0, 2, keys);
    const TcpTerms terms = terms_of(keys);
    std::vector<ProcessFd> strangers;
    for (int i = 0; i < 40; ++i) strangers.push_back(connect_to(mesh));
    const TcpSelf peer{1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
    TcpHandshake handshake(connect_to(mesh), peer, 0, mesh->card().mesh, 0);
    const auto next = static_cast<rlim_t>(open_null());
    const rlimit low{next + 10, next + 10};
    ::setrlimit(RLIMIT_NOFILE, &low);
    const Deadline patience = Deadline::after(seconds(10));
    while (handshake.advance() == TcpHandshake::State::Going && !patience.passed()) mesh->look();
    CHECK_EQ(mesh->failure().message(), std::string());
    return handshake.advance() == TcpHandshake::State::Done;
  }));
}

}  // namespace
}  // namespace ours::testing
