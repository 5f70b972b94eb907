#include <atomic>
#include <thread>

#include "support/message_ranks.h"

// Callbacks of messages, which may wait for other messages and close their group.

namespace ours::testing {
namespace {

const std::vector<int> kSent = numbers(1, 8);

// Two receives end together, and the callback of the first waits for the second.
TEST(a_callback_may_wait_for_another_transfer) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    if (self.rank == 0) {
      for (const int tag : {1, 2}) port.wait(port.send(kSent, 1, tag));
      return;
    }
    std::vector<int> first(8), second(8);
    std::atomic<bool> waited{false};
    // When they are posted in this order, the two messages are found in the channel together.
    const auto later = port.recv(second, 0, 2);
    const auto earlier = port.recv(first, 0, 1, [&] {
      port.p2p->wait(*later);
      waited = true;
    });
    port.wait(earlier);
    port.wait(later);
    wait_until([&] { return waited.load(); });
    CHECK(first == kSent && second == kSent);
  });
}

// The callback of the first receive waits for a second one, whose message is sent then, and no thread is in wait().
void wait_in_a_callback(Carrier carrier, bool first_is_there) {
  std::atomic<bool> sent{false}, began{false}, ended{false};
  run_ranks(carrier, 2, [&](const Rank& self) {
    Port port(self.p2p);
    if (self.rank == 0) {
      port.wait(port.send(kSent, 1, 1));
      sent = true;
      wait_until([&] { return began.load(); });
      return port.wait(port.send(kSent, 1, 2));
    }
    std::vector<int> first(8), second(8);
    if (first_is_there) wait_until([&] { return sent.load(); });
    const auto later = port.recv(second, 0, 2);
    const auto earlier = port.recv(first, 0, 1, [&] {
      began = true;
      const Deadline end = Deadline::after(std::chrono::minutes(1));
      while (!later->done() && !end.passed()) std::this_thread::yield();
      ended = true;
    });
    wait_until([&] { return ended.load(); });
    CHECK(earlier->done() && later->done());
    CHECK(first == kSent && second == kSent);
    port.p2p->close();
    CHECK(port.p2p->wait_closed(std::chrono::seconds(30)));
  });
}

TEST(a_callback_may_wait_for_what_only_the_background_moves) {
  for (const Carrier carrier : kCarriers) {
    wait_in_a_callback(carrier, false);
    // Over TCP nothing comes before a receive is posted.
    if (carrier != Carrier::Tcp) wait_in_a_callback(carrier, true);
  }
}

/// Two callbacks, one of which waits for the other.
struct Callbacks {
  std::function<void()> waiting() {
    return [this] {
      const Deadline end = Deadline::after(std::chrono::minutes(1));
      while (!called && !end.passed()) std::this_thread::yield();
      ended = true;
    };
  }
  std::function<void()> awaited() {
    return [this] { called = true; };
  }

  std::atomic<bool> called{false}, ended{false};
};

// Two receives are found together, and the callback of the first waits for that of the second.
TEST(a_callback_may_wait_for_the_callback_of_what_ended_with_it) {
  for (const Carrier carrier : kCarriers) {
    Callbacks callbacks;
    std::atomic<bool> posted{false}, sent{false};
    run_ranks(carrier, 2, [&](const Rank& self) {
      Port port(self.p2p);
      const auto wait_for_end = [&] { wait_until([&] { return callbacks.ended.load(); }); };
      if (self.rank == 0) {
        wait_until([&] { return posted.load(); });
        for (int tag : {0, 1, 2}) port.wait(port.send(kSent, 1, tag));
        sent = true;
        return wait_for_end();
      }
      std::vector<std::vector<int>> got(3, std::vector<int>(8));
      port.recv(got[1], 0, 1, callbacks.waiting());
      port.recv(got[2], 0, 2, callbacks.awaited());
      // Holds up the background thread until both can be found.
      port.p2p->recv(span(got[0]), DType::Int32, 0, 0, soon(), [&](const Transfer&) {
        wait_until([&] { return sent.load(); });
        return nullptr;
      });
      posted = true;
      wait_for_end();
      CHECK(callbacks.called.load());
      for (const auto& one : got) CHECK(one == kSent);
    });
  }
}

// The callback of one posted receive waits for that of another when the group is closed.
TEST(closing_runs_callbacks_that_wait_for_each_other) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::vector<int> got(8);
    Callbacks callbacks;
    port.recv(got, 1 - session->rank(), 1, callbacks.waiting());
    port.recv(got, 1 - session->rank(), 2, callbacks.awaited());
    port.p2p->close();
    CHECK(port.p2p->wait_closed(std::chrono::seconds(30)));  // the background may have taken one of them
    CHECK(callbacks.ended.load() && callbacks.called.load());
  });
}

// The callback of the first receive waits for a second one, whose own callback must not run inside it.
TEST(a_callback_that_waits_runs_no_other_inside) {
  run_ranks(2, [](const Rank& self) {
    Port port(self.p2p);
    if (self.rank == 1) {
      for (const int tag : {1, 2}) port.wait(port.send(kSent, 0, tag));
      return;
    }
    thread_local bool inside = false;
    std::vector<int> first(8), second(8);
    std::atomic<bool> nested{false};
    std::atomic<int> called{0};
    const auto later = port.recv(second, 1, 2, [&] {
      nested = inside;
      ++called;
    });
    const auto earlier = port.recv(first, 1, 1, [&] {
      inside = true;
      port.wait(later);
      const Deadline end = Deadline::after(std::chrono::minutes(1));
      while (called == 0 && !end.passed()) std::this_thread::yield();
      inside = false;
      ++called;
    });
    port.wait(earlier);
    wait_until([&] { return called == 2; });
    CHECK(!nested.load());
    CHECK(first == kSent && second == kSent);
  });
}

// The callback waits for what the thread does that found the message, when it posted or waited for another.
TEST(a_callback_may_wait_for_what_the_program_does_next) {
  for (const Carrier carrier : kCarriers) {
    for (const bool waits : {false, true}) {
      std::atomic<bool> ended{false};
      run_ranks(carrier, 2, [&](const Rank& self) {
        Port port(self.p2p);
        if (self.rank == 0) {
          for (const int tag : {1, 2, 3}) port.wait(port.send(kSent, 1, tag));
          return wait_until([&] { return ended.load(); });
        }
        std::vector<std::vector<int>> got(3, std::vector<int>(8));
        port.wait(port.recv(got[2], 0, 3));  // the others have come before it
        std::atomic<bool> next{false};
        const auto earlier = port.recv(got[0], 0, 1, [&] {
          const Deadline end = Deadline::after(std::chrono::minutes(1));
          while (!next && !end.passed()) std::this_thread::yield();
          ended = true;
        });
        const auto later = port.recv(got[1], 0, 2);
        if (waits) port.wait(later);
        CHECK(!ended.load());
        next = true;
        wait_until([&] { return ended.load(); });
        port.wait(earlier);
        port.wait(later);
        for (const auto& one : got) CHECK(one == kSent);
      });
    }
  }
}

// Nobody waits for a message, or somebody rests in the wait for one, or the messages are closed.
TEST(callbacks_that_are_handed_over_run_on_another_thread) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    if (session->rank() == 1) {
      std::vector<int> go(8);
      port.wait(port.recv(go, 0, 1));
      return port.wait(port.send(kSent, 0));
    }
    std::thread::id caller;
    std::atomic<int> calls{0};
    const auto hand_over = [&] {
      const int before = calls;
      port.p2p->call([&] {
        caller = std::this_thread::get_id();
        ++calls;
      });
      wait_until([&] { return calls == before + 1; });
      CHECK(caller != std::this_thread::get_id());
    };
    hand_over();
    std::vector<int> got(8);
    std::thread waiter([&] { port.wait(port.recv(got, 1)); });
    hand_over();
    port.wait(port.send(kSent, 1, 1));
    waiter.join();
    port.p2p->close();
    hand_over();
    CHECK(port.p2p->wait_closed(std::chrono::seconds(30)));
  });
}

// Whoever closes the messages waits for callbacks that still run.
TEST(waiting_for_the_end_waits_for_callbacks_that_were_handed_over) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    std::atomic<bool> begun{false}, go{false};
    port.p2p->call([&] {
      begun = true;
      wait_until([&] { return go.load(); });
    });
    wait_until([&] { return begun.load(); });
    port.p2p->close();
    CHECK(!port.p2p->wait_closed(std::chrono::milliseconds(1)));
    go = true;
    CHECK(port.p2p->wait_closed(std::chrono::seconds(30)));
  });
}

TEST(closing_ends_what_is_posted_and_the_thread_even_from_a_callback) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Port port(session);
    if (session->rank() == 1) return port.wait(port.send(kSent, 0));
    std::vector<int> got(8), never(8);
    const auto pending = port.recv(never, 1, 9);
    std::atomic<bool> dropped{false};
    const auto transfer = port.recv(got, 1, 0, [&] {
      port.p2p->close();
      port.p2p.reset();
      dropped = true;
    });
    wait_until([&] { return dropped.load(); });
    CHECK(pending->done() && pending->error() != nullptr);
    CHECK(!transfer->error());
  });
}

}  // namespace
}  // namespace ours::testing
