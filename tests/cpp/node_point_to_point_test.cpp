#include <pthread.h>

#include <atomic>

#include "node_port.h"

// The contract of PointToPoint, on shared memory, with ranks as threads. The rings hold 4 KiB.

namespace ours {
namespace {

using testing::numbers;
using testing::Port;
using testing::run_sessions;
using testing::run_sessions_catching;
using testing::soon;

TEST(messages_of_all_sizes_arrive_in_order) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    for (size_t count : {0, 1, 7, 1000, 1024, 1025, 30000}) {
      for (int i = 0; i < 3; ++i) {
        if (session->rank() == 0) {
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
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    constexpr int kTags = 5;
    constexpr size_t kCount = 3000;  // larger than the ring
    if (session->rank() == 0) {
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

TEST(any_source_takes_from_everyone) {
  run_sessions(4, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    if (session->rank() != 0) {
      const auto data = numbers(session->rank(), 2000);
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
  run_sessions(3, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::vector<std::vector<int>> out(3), in(3, std::vector<int>(20000));
    std::vector<std::shared_ptr<Transfer>> all;
    for (int r = 0; r < 3; ++r) {
      out[static_cast<size_t>(r)] = numbers(session->rank() * 3 + r, 20000);
      all.push_back(port.send(out[static_cast<size_t>(r)], r));  // also to itself
    }
    for (int r = 0; r < 3; ++r) all.push_back(port.recv(in[static_cast<size_t>(r)], r));
    // Nobody waits: the background threads must do it.
    for (const auto& transfer : all) {
      while (!transfer->done()) std::this_thread::yield();
      CHECK(!transfer->error());
    }
    for (int r = 0; r < 3; ++r) CHECK(in[static_cast<size_t>(r)] == numbers(r * 3 + session->rank(), 20000));
  });
}

TEST(a_message_that_does_not_fit_fails_both_sides) {
  const auto errors = run_sessions_catching(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::vector<int> data(session->rank() == 0 ? 5000 : 4999);
    const auto transfer = session->rank() == 0 ? port.send(data, 1, 3) : port.recv(data, 0, 3);
    const std::string message = CHECK_THROWS(MismatchError, port.wait(transfer));
    CHECK(message.find("4999 x int32") != std::string::npos && message.find("5000 x int32") != std::string::npos);
  });
  for (const auto& error : errors) CHECK_EQ(testing::message_of(error), std::string());
}

TEST(a_receive_times_out_and_one_from_a_rank_that_left_fails) {
  const auto errors = run_sessions_catching(2, 4096, [](std::shared_ptr<NodeSession> session) {
    if (session->rank() == 1) return;
    const auto p2p = make_node_point_to_point(session);
    int x = 0;
    auto transfer =
        p2p->recv(Span{&x, 4}, DType::Int32, 1, 0, Deadline::after(std::chrono::milliseconds(100)), nullptr);
    p2p->wait(*transfer);
    CHECK(transfer->error() != nullptr);
    CHECK(testing::message_of(transfer->error()).find("100ms") != std::string::npos);
  });
  for (const auto& error : errors) CHECK_EQ(testing::message_of(error), std::string());

  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::vector<int> data = numbers(1, 10);
    if (session->rank() == 1) {
      port.wait(port.send(data, 0));
      session->leave();
      return;
    }
    while (session->absence(1) == nullptr) std::this_thread::yield();
    std::vector<int> got(10);
    port.wait(port.recv(got, 1));  // sent before it left
    CHECK(got == data);
    const std::string message = CHECK_THROWS(PeerError, port.wait(port.recv(got, 1)));
    CHECK(message.find("left the group") != std::string::npos);
  });
}

// While it lives no thread can be started: new ones would get a stack larger than the address space.
class NoThreads {
 public:
  NoThreads() {
    ::pthread_getattr_default_np(&usual_);
    pthread_attr_t huge;
    ::pthread_attr_init(&huge);
    ::pthread_attr_setstacksize(&huge, size_t{1} << 48);
    ::pthread_setattr_default_np(&huge);
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&usual_);
    ::pthread_attr_destroy(&usual_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t usual_;
};

TEST(without_a_thread_for_it_a_transfer_ends_once_and_fails_the_group) {
  std::atomic<int> ranks{0};
  run_sessions(2, 4096, [&](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::vector<int> data(8);
    // The ranks are threads themselves.
    ++ranks;
    while (ranks.load() < 2) std::this_thread::yield();
    if (session->rank() == 1) {
      while (!session->failure().failed()) std::this_thread::yield();
      const std::string message = CHECK_THROWS(Error, port.wait(port.send(data, 0)));
      CHECK_CONTAINS(message, "cannot start a thread");
      return;
    }
    std::atomic<int> calls{0};
    std::shared_ptr<Transfer> transfer;
    {
      const NoThreads none;
      transfer = port.p2p->recv(Span{data.data(), 32}, DType::Int32, 1, 0, soon(), [&](const Transfer&) {
        ++calls;
        return nullptr;
      });
    }
    CHECK(transfer->done());
    const std::string message = CHECK_THROWS(Error, port.wait(transfer));
    CHECK_CONTAINS(message, "rank 0");
    CHECK_CONTAINS(message, "cannot start a thread");
    CHECK(!port.p2p->busy());
    port.p2p->close();
    CHECK_EQ(calls.load(), 1);
  });
}

}  // namespace
}  // namespace ours
