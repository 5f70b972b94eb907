#include <sys/socket.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "collectives/tcp/tcp_messages.h"
#include "support/message_ranks.h"
#include "support/tcp_puppet.h"

// A rank that knows the secret and turns hostile: its peers' calls end with an error that names it, and take little
// memory. tests/fuzz/parsers/peer_parser.cpp tries many more of its words.

namespace ours::testing {
namespace {

/// What rank 1 says of its first call while rank 0 sends `words` on its connection `stream`.
std::string answer_to(int stream, const std::string& words, const std::function<void(TcpGroup&)>& call) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(2, keys);
  TcpGroup group(join_others(2, keys)[1]);
  std::string answer;
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      answer = CHECK_THROWS(Error, call(group));
      return;
    }
    puppet.connect(1);
    puppet.send(stream, words.data(), words.size());
  });
  return answer;
}

void barrier_of(TcpGroup& group) { barrier(group, 0, std::chrono::seconds(20)); }

std::string frame(const FrameHeader& header) { return {reinterpret_cast<const char*>(&header), sizeof(header)}; }

TEST(a_failure_without_words_names_the_rank_that_failed) {
  FrameHeader header;
  header.kind = FrameKind::Failure;
  CHECK_EQ(answer_to(0, frame(header), barrier_of), "rank 0 (host puppet, pid 4711) failed, and did not say why");
}

TEST(a_failure_in_strange_letters_is_printable) {
  FrameHeader header;
  header.kind = FrameKind::Failure;
  const std::string words("\0enough\n\x1b[2J\x7f", 13);
  header.bytes = words.size();
  CHECK_EQ(answer_to(0, frame(header) + words, barrier_of), "?enough\n?[2J?");
}

TEST(a_rank_that_agrees_without_end_fails_the_group) {
  FrameHeader header;
  header.kind = FrameKind::Agree;
  header.call = 2;
  std::string words;
  for (int i = 0; i < 5000; ++i) words += frame(header);
  CHECK_CONTAINS(answer_to(0, words, barrier_of), "rank 0 (host puppet, pid 4711) sent");
  CHECK_CONTAINS(answer_to(0, words, barrier_of), "it is too far ahead");
}

// It leaves when it has sent all, of which the last may come after what says that it left.
TEST(data_that_comes_after_the_end_of_another_stream_is_waited_for) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(2, keys, 2);
  TcpGroup group(join_others(2, keys)[1]);
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      std::vector<float> own{3, 4}, other(2);
      const std::vector<Span> outputs{span(other), span(own)};
      group.all_gather(call_of(Op::AllGather, DType::Float32, 0), const_span(own), outputs);
      CHECK(other == own);  // what the puppet has sent back
      return;
    }
    puppet.connect(1);
    const std::string message = puppet.receive(1, sizeof(FrameHeader) + 2 * sizeof(float));
    FrameHeader agrees;
    const std::string begun = puppet.receive(0, sizeof(agrees));
    FrameHeader bye;
    bye.kind = FrameKind::Bye;
    const std::string words = begun + frame(bye);
    puppet.send(0, words.data(), words.size());
    ::shutdown(puppet.fd(2), SHUT_WR);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // in which it could be taken for lost
    puppet.send(1, message.data(), message.size());
  });
}

TEST(a_message_longer_than_all_memory_fails_the_receive) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(2, keys);
  Port port(make_tcp_point_to_point(join_others(2, keys)[1], nullptr));
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      // It has another tag, so that the message would have to be set aside.
      std::vector<int> data(4);
      CHECK_CONTAINS(CHECK_THROWS(Error, port.wait(port.recv(data, 0, 1))), "has no memory for a message of");
      return;
    }
    puppet.connect(1);
    FrameHeader header;
    header.call = 1;
    header.total = header.bytes = uint64_t{1} << 60;
    const std::string words = frame(header);
    puppet.send(1, words.data(), words.size());
  });
}

}  // namespace
}  // namespace ours::testing
