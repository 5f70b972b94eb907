#include <atomic>

#include "collectives/tcp/tcp_messages.h"
#include "support/message_ranks.h"
#include "support/tcp_ranks.h"
#include "transport/group_failure.h"

// The contract of PointToPoint, with any carrier of messages and ranks as threads. The rings in shared memory hold 4
// KiB.

namespace ours::testing {
namespace {

TEST(messages_of_all_sizes_arrive_in_order) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    for (size_t count : {0, 1, 7, 1000, 1024, 1025, 30000}) {
      for (int i = 0; i < 3; ++i) {
        if (self.rank == 0) {
          const auto data = numbers(i, count);
          port.wait(port.send(data, 1));
        } else {
          std::vector<int> data(count);
          auto transfer = port.recv(data, 0);
          port.wait(transfer);
          CHECK(data == numbers(i, count));
          CHECK_EQ(transfer->source(), 0);
        }
      }
    }
  });
}

TEST(tags_may_be_received_in_any_order) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    constexpr int kTags = 5;
    constexpr size_t kCount = 3000;  // larger than the ring
    if (self.rank == 0) {
      std::vector<std::vector<int>> data;
      std::vector<std::shared_ptr<Transfer>> sends;
      for (int tag = 0; tag < kTags; ++tag) data.push_back(numbers(tag, kCount));
      for (int tag = 0; tag < kTags; ++tag) sends.push_back(port.send(data[static_cast<size_t>(tag)], 1, tag));
      for (auto& send : sends) port.wait(send);
    } else {
      for (int tag = kTags - 1; tag >= 0; --tag) {
        std::vector<int> data(kCount);
        port.wait(port.recv(data, 0, tag));
        CHECK(data == numbers(tag, kCount));
      }
    }
  });
}

TEST(a_short_send_need_not_wait_for_its_receive) {
  run_ranks(4, [](const Rank& self) {
    Port port(self.p2p);
    const auto data = numbers(1, 10);
    std::vector<int> received(10);
    if (self.rank == 2) {
      port.wait(port.send(data, 0));
      port.wait(port.send(data, 1));
    } else if (self.rank == 1) {
      port.wait(port.recv(received, 2));
      port.wait(port.send(received, 0));
    } else if (self.rank == 0) {
      port.wait(port.recv(received, 1));
      port.wait(port.recv(received, 2));
      CHECK(received == data);
    }
  });
}

TEST(any_source_takes_from_everyone) {
  run_ranks(4, [](const Rank& self) {
    Port port(self.p2p);
    if (self.rank != 0) {
      const auto data = numbers(self.rank, 2000);
      port.wait(port.send(data, 0));
      return;
    }
    std::vector<bool> seen(4, false);
    for (int i = 1; i < 4; ++i) {
      std::vector<int> data(2000);
      auto transfer = port.recv(data, kAnySource);
      port.wait(transfer);
      CHECK(data == numbers(transfer->source(), 2000));
      CHECK(!seen[static_cast<size_t>(transfer->source())]);
      seen[static_cast<size_t>(transfer->source())] = true;
    }
  });
}

TEST(both_directions_at_once_do_not_deadlock_and_complete_in_the_background) {
  run_ranks(3, [](const Rank& self) {
    Port port(self.p2p);
    std::vector<std::vector<int>> out(3), in(3, std::vector<int>(20000));
    std::vector<std::shared_ptr<Transfer>> all;
    for (int r = 0; r < 3; ++r) {
      out[static_cast<size_t>(r)] = numbers(self.rank * 3 + r, 20000);
      all.push_back(port.send(out[static_cast<size_t>(r)], r));  // also to itself
    }
    for (int r = 0; r < 3; ++r) all.push_back(port.recv(in[static_cast<size_t>(r)], r));
    // No thread waits, so the background threads must move the messages.
    for (const auto& transfer : all) {
      wait_until([&] { return transfer->done(); });
      CHECK(!transfer->error());
    }
    for (int r = 0; r < 3; ++r) CHECK(in[static_cast<size_t>(r)] == numbers(r * 3 + self.rank, 20000));
  });
}

TEST(a_message_that_does_not_fit_fails_both_sides) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    // More than the system takes from a sender.
    std::vector<int> data(self.rank == 0 ? 5000000 : 4999999);
    const auto transfer = self.rank == 0 ? port.send(data, 1, 3) : port.recv(data, 0, 3);
    const std::string message = CHECK_THROWS(MismatchError, port.wait(transfer));
    CHECK_CONTAINS(message, "4999999 x int32");
    CHECK_CONTAINS(message, "5000000 x int32");
  });
}

TEST(a_receive_times_out_and_one_from_a_rank_that_left_fails) {
  run_ranks(2, [](const Rank& self) {
    if (self.rank == 1) return;
    const auto& p2p = self.p2p;
    int x = 0;
    const auto limit = std::make_shared<TransferLimit>(std::chrono::milliseconds(100));
    auto transfer = p2p->recv(Span{&x, 4}, DType::Int32, 1, 0, limit, nullptr);
    p2p->wait(*transfer);
    CHECK_CONTAINS(message_of(transfer->error()), "100ms");
  });

  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    std::vector<int> data = numbers(1, 10);
    if (self.rank == 1) {
      port.wait(port.send(data, 0));
      GroupFailure other;
      other.record(FailureKind::Peer, "rank 7 of another group died");
      self.leave();
      return;
    }
    std::vector<int> got(10);
    port.wait(port.recv(got, 1));  // sent before it left
    CHECK(got == data);
    const std::string message = CHECK_THROWS(PeerError, port.wait(port.recv(got, 1)));
    CHECK_CONTAINS(message, "left the group");
    CHECK_CONTAINS(message, "rank 7 of another group died");
  });
}

TEST(a_receive_may_take_over_a_message_that_is_being_set_aside) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    constexpr size_t kCount = 3000000;  // more than the system takes
    if (self.rank == 0) {
      const auto first = numbers(1, kCount), second = numbers(2, 10);
      const auto a = port.send(first, 1, 1), b = port.send(second, 1, 2);
      port.wait(a);
      port.wait(b);
      return;
    }
    std::vector<int> first(kCount), second(10);
    const auto b = port.recv(second, 0, 2);  // sets the first aside
    const auto a = port.recv(first, 0, 1);
    port.wait(b);
    port.wait(a);
    CHECK(first == numbers(1, kCount));
    CHECK(second == numbers(2, 10));
  });
}

// A background thread that rests must not need a lock that a posting thread holds.
TEST(messages_may_be_posted_while_the_background_rests) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    constexpr int kMessages = 2000;
    std::vector<std::vector<int>> out, in(kMessages, std::vector<int>(1));
    std::vector<std::shared_ptr<Transfer>> all;
    for (int i = 0; i < kMessages; ++i) out.push_back({i});
    for (size_t i = 0; i < kMessages; ++i) {
      all.push_back(port.recv(in[i], 1 - self.rank));
      all.push_back(port.send(out[i], 1 - self.rank));
    }
    for (const auto& transfer : all) {
      wait_until([&] { return transfer->done(); });
      CHECK(!transfer->error());
    }
    CHECK(in == out);
  });
}

TEST(messages_of_a_group_that_was_aborted_end) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    std::vector<int> data(8);
    if (self.rank == 1) return;
    const auto transfer = port.recv(data, 1);
    CHECK(!transfer->done());
    port.p2p->close();
    CHECK(transfer->done());
    CHECK_THROWS(AbortedError, port.wait(transfer));
    CHECK_THROWS(Error, port.wait(port.recv(data, 1)));
  });
}

// The failure of a group's collectives is also one of its messages, and the other way round.
TEST(messages_over_tcp_fail_with_their_group) {
  const auto calls = make_meshes(2);
  const auto messages = make_meshes(2);
  for (size_t r = 0; r < 2; ++r) TcpMesh::share_failures(messages[r], calls[r]);
  run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    TcpGroup group(calls[r]);
    Port port(make_tcp_point_to_point(messages[r], calls[r]));
    std::vector<int> data(8);
    if (rank == 0) {
      const auto transfer = port.recv(data, 1);
      CHECK_CONTAINS(CHECK_THROWS(AbortedError, port.wait(transfer)), "rank 1");
      CHECK_CONTAINS(group.failure(), "of no further use");
      return;
    }
    port.wait(port.send(data, 0, 5));  // so that the two are connected
    group.abort("of no further use");
    CHECK_CONTAINS(CHECK_THROWS(AbortedError, port.wait(port.send(data, 0))), "rank 1");
  });
}

/// Keys that know whether a rank has waited for one.
class KeysWaitedFor final : public KeyValues {
 public:
  void set(const std::string& key, const std::string& value) override { keys_.set(key, value); }
  std::string get(const std::string& key, Deadline deadline) override {
    waited_for = true;
    return keys_.get(key, deadline);
  }

  std::atomic<bool> waited_for{false};

 private:
  MapKeys keys_;
};

TEST(a_message_to_a_rank_that_is_not_there_yet_holds_up_no_other) {
  const auto keys = std::make_shared<KeysWaitedFor>();
  const auto join = [&](int rank) { return make_tcp_point_to_point(join_mesh(rank, 2, keys), nullptr); };
  Port early(join(0));
  run_ranks(2, [&](int thread) {
    const auto sent = numbers(1, 100);
    if (thread == 0) return early.wait(early.send(sent, 1));
    wait_until([&] { return keys->waited_for.load(); });
    std::vector<int> data(100);
    const auto received = early.recv(data, 0);
    const auto own = numbers(2, 100);
    early.wait(early.send(own, 0));
    early.wait(received);
    CHECK(data == own);
    Port late(join(1));
    late.wait(late.recv(data, 0));
    CHECK(data == sent);
  });
}

}  // namespace
}  // namespace ours::testing
