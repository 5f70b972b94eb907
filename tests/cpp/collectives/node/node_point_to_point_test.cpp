#include <pthread.h>

#include <atomic>
#include <memory>
#include <thread>

#include "support/message_ranks.h"

// Messages in shared memory when no thread can be started. The contract is in point_to_point_contract_test.cpp.

namespace ours::testing {
namespace {

// While it lives, no thread can be started, because new ones would get a stack larger than the address space.
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
    // The ranks themselves are threads.
    ++ranks;
    wait_until([&] { return ranks == 2; });
    if (session->rank() == 1) {
      wait_until([&] { return session->failure().failed(); });
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
    port.p2p->close();
    CHECK_EQ(calls.load(), 1);
  });
}

// Two receives are found together. The callback of the first waits for a third message, which is sent after the
// callback of the second, and only the thread that is inside the first can run that.
TEST(without_another_thread_a_callback_that_waits_runs_the_next_one) {
  std::atomic<bool> posted{false}, sent{false}, called{false}, ended{false};
  std::unique_ptr<NoThreads> none;
  run_ranks(Carrier::Node, 2, [&](const Rank& self) {
    Port port(self.p2p);
    if (self.rank == 0) {
      wait_until([&] { return posted.load(); });
      none = std::make_unique<NoThreads>();
      std::vector<int> data(8);
      for (const int tag : {0, 1, 2}) port.wait(port.send(data, 1, tag));
      sent = true;
      const Deadline end = Deadline::after(std::chrono::seconds(10));
      while (!called && !end.passed()) std::this_thread::yield();
      const bool in_time = called;
      port.wait(port.send(data, 1, 3));  // in any case, so that this test ends
      wait_until([&] { return ended.load(); });
      none.reset();
      CHECK(in_time);
      return;
    }
    std::vector<std::vector<int>> got(4, std::vector<int>(8));
    const auto last = port.recv(got[3], 0, 3);
    port.recv(got[1], 0, 1, [&] {
      port.wait(last);
      ended = true;
    });
    port.recv(got[2], 0, 2, [&] { called = true; });
    // Holds up the background thread until both can be found.
    port.p2p->recv(span(got[0]), DType::Int32, 0, 0, soon(), [&](const Transfer&) {
      wait_until([&] { return sent.load(); });
      return nullptr;
    });
    posted = true;
    wait_until([&] { return ended.load(); });
  });
}

}  // namespace
}  // namespace ours::testing
