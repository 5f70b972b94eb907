#include <atomic>
#include <thread>

#include "support/message_ranks.h"

// Callbacks of messages, which may wait for other messages and close their group.

namespace ours {
namespace {

using testing::Carrier;
using testing::numbers;
using testing::Port;
using testing::Rank;
using testing::run_ranks;
using testing::run_sessions;
using testing::soon;

// Two receives end together, and the callback of the first waits for the second.
TEST(a_callback_may_wait_for_another_transfer) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    const std::vector<int> data = numbers(1, 8);
    if (self.rank == 0) {
      port.wait(port.send(data, 1, 1));
      port.wait(port.send(data, 1, 2));
      return;
    }
    std::vector<int> first(8), second(8);
    std::shared_ptr<Transfer> later;
    std::atomic<bool> waited{false};
    const Span into{first.data(), first.size() * sizeof(int)};
    // When they are posted in this order, the two messages are found in the channel together.
    later = port.recv(second, 0, 2);
    auto transfer = port.p2p->recv(into, DType::Int32, 0, 1, soon(), [&](const Transfer&) {
      return [&] {
        port.p2p->wait(*later);
        waited.store(true);
      };
    });
    port.wait(transfer);
    port.wait(later);
    while (!waited.load()) std::this_thread::yield();
    CHECK(first == data && second == data);
  });
}

// The callback of the first receive waits for a second one, whose message is sent then, and no thread is in wait().
TEST(a_callback_may_wait_for_what_only_the_background_moves) {
  for (const Carrier carrier : {Carrier::Node, Carrier::Tcp}) {
    std::atomic<bool> began{false}, ended{false};
    run_ranks(carrier, 2, [&](const Rank& self) {
      Port port(self.p2p);
      const auto data = numbers(1, 8);
      if (self.rank == 0) {
        port.wait(port.send(data, 1, 1));
        while (!began.load()) std::this_thread::yield();
        port.wait(port.send(data, 1, 2));
        return;
      }
      std::vector<int> first(8), second(8);
      const auto later = port.recv(second, 0, 2);
      const auto transfer = port.p2p->recv(Span{first.data(), 32}, DType::Int32, 0, 1, soon(), [&](const Transfer&) {
        return [&] {
          began.store(true);
          const Deadline end = Deadline::after(std::chrono::minutes(1));
          while (!later->done() && !end.passed()) std::this_thread::yield();
          ended.store(true);
        };
      });
      while (!ended.load()) std::this_thread::yield();
      CHECK(transfer->done() && later->done());
      CHECK(first == data && second == data);
      port.p2p->close();
      CHECK(port.p2p->wait_closed(std::chrono::seconds(30)));
    });
  }
}

// Two receives are found together, and the callback of the first waits for that of the second.
TEST(a_callback_may_wait_for_the_callback_of_what_ended_with_it) {
  for (const Carrier carrier : {Carrier::Node, Carrier::Tcp}) {
    std::atomic<bool> posted{false}, sent{false}, called{false}, ended{false};
    run_ranks(carrier, 2, [&](const Rank& self) {
      Port port(self.p2p);
      const auto data = numbers(1, 8);
      if (self.rank == 0) {
        while (!posted.load()) std::this_thread::yield();
        for (int tag : {0, 1, 2}) port.wait(port.send(data, 1, tag));
        sent.store(true);
        while (!ended.load()) std::this_thread::yield();
        return;
      }
      std::vector<std::vector<int>> got(3, std::vector<int>(8));
      const auto post = [&](size_t tag, const TransferDone& done) {
        port.p2p->recv(Span{got[tag].data(), 32}, DType::Int32, 0, static_cast<int>(tag), soon(), done);
      };
      post(1, [&](const Transfer&) {
        return [&] {
          const Deadline end = Deadline::after(std::chrono::minutes(1));
          while (!called.load() && !end.passed()) std::this_thread::yield();
          ended.store(true);
        };
      });
      post(2, [&](const Transfer&) { return [&] { called.store(true); }; });
      // Holds up the background thread until both can be found.
      post(0, [&](const Transfer&) {
        while (!sent.load()) std::this_thread::yield();
        return nullptr;
      });
      posted.store(true);
      while (!ended.load()) std::this_thread::yield();
      CHECK(called.load());
      for (const auto& one : got) CHECK(one == data);
    });
  }
}

// The callback of one posted receive waits for that of another when the group is closed.
TEST(closing_runs_callbacks_that_wait_for_each_other) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::vector<int> got(8);
    std::atomic<bool> called{false};
    std::atomic<bool> ended{false};
    const auto post = [&](int tag, TransferDone done) {
      port.p2p->recv(Span{got.data(), 32}, DType::Int32, 1 - session->rank(), tag, soon(), std::move(done));
    };
    post(1, [&](const Transfer&) {
      return [&] {
        const Deadline end = Deadline::after(std::chrono::minutes(1));
        while (!called.load() && !end.passed()) std::this_thread::yield();
        ended.store(true);
      };
    });
    post(2, [&](const Transfer&) { return [&] { called.store(true); }; });
    port.p2p->close();
    CHECK(ended.load() && called.load());
  });
}

// The callback of the first receive waits for a second one, whose own callback must not run inside it.
TEST(a_callback_that_waits_runs_no_other_inside) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    const std::vector<int> data = numbers(1, 8);
    if (self.rank == 1) {
      port.wait(port.send(data, 0, 1));
      port.wait(port.send(data, 0, 2));
      return;
    }
    thread_local bool inside = false;
    std::vector<int> first(8), second(8);
    std::atomic<bool> nested{false};
    std::atomic<int> called{0};
    const auto recv = [&](std::vector<int>& into, int tag, TransferDone done) {
      return port.p2p->recv(Span{into.data(), 32}, DType::Int32, 1, tag, soon(), std::move(done));
    };
    const auto later = recv(second, 2, [&](const Transfer&) {
      return [&] {
        nested.store(inside);
        ++called;
      };
    });
    const auto earlier = recv(first, 1, [&](const Transfer&) {
      return [&] {
        inside = true;
        port.wait(later);
        const Deadline end = Deadline::after(std::chrono::minutes(1));
        while (called.load() == 0 && !end.passed()) std::this_thread::yield();
        inside = false;
        ++called;
      };
    });
    port.wait(earlier);
    while (called.load() < 2) std::this_thread::yield();
    CHECK(!nested.load());
    CHECK(first == data && second == data);
  });
}

TEST(closing_ends_what_is_posted_and_the_thread_even_from_a_callback) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    if (session->rank() == 1) {
      Port port(session);
      const std::vector<int> data = numbers(1, 8);
      port.wait(port.send(data, 0));
      return;
    }
    auto p2p = make_node_point_to_point(session);
    std::vector<int> got(8), never(8);
    const auto soon = std::make_shared<TransferLimit>(std::chrono::seconds(60));
    auto pending = p2p->recv(Span{never.data(), 32}, DType::Int32, 1, 9, soon, nullptr);
    CHECK(p2p->busy());
    std::atomic<bool> dropped{false};
    auto posting = p2p;  // the call below must not lose its object
    auto transfer = posting->recv(Span{got.data(), 32}, DType::Int32, 1, 0, soon, [&](const Transfer&) {
      return [&] {
        p2p->close();
        p2p.reset();
        dropped.store(true);
      };
    });
    posting.reset();
    while (!dropped.load()) std::this_thread::yield();
    CHECK(pending->done() && pending->error() != nullptr);
    CHECK(!transfer->error());
  });
}

}  // namespace
}  // namespace ours
