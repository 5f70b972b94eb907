#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "common/interval.h"
#include "support/groups.h"
#include "support/patience.h"

// The errors that ranks of groups over several nodes get when something goes wrong on one of them.

namespace ours {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::call_of;
using testing::loopback_config;
using testing::make_hierarchical;
using testing::run_ranks;

using NodeOf = std::function<int(int)>;

TEST(an_absent_rank_is_named_on_all_nodes) {
  // Rank 3 is no leader: only rank 1 waits for it, on a rail or in the node, and all others wait for rank 1.
  const auto leave_out_rank_3 = [](const NodeOf& node_of, milliseconds timeout) {
    const auto makers = make_hierarchical(6, node_of);
    run_ranks(6, [&](int rank) {
      const auto group = makers[static_cast<size_t>(rank)]();
      std::vector<float> data(1 << 18, 1.0f);
      const auto reduce = [&](uint64_t seq, milliseconds patience) {
        group->all_reduce(call_of(Op::AllReduce, DType::Float32, seq, patience), data.data(), data.data(), data.size(),
                          Reduction{ReduceKind::Sum, 6, 1.0});
      };
      reduce(0, seconds(20));
      if (rank == 3) {
        while (group->failure().empty()) std::this_thread::yield();
        return;
      }
      const std::string message = CHECK_THROWS(TimeoutError, reduce(1, timeout));
      CHECK_CONTAINS(message, "all_reduce number 1");
      CHECK_CONTAINS(message, " for rank 3 (host ");
      CHECK(message.find("), rank") == std::string::npos);
    });
  };
  for (const NodeOf& node_of : {NodeOf([](int r) { return r % 2; }), NodeOf([](int r) { return r / 2; })}) {
    testing::with_growing_timeouts([&](milliseconds timeout) { leave_out_rank_3(node_of, timeout); });
  }
}

/// Returns the nanoseconds from an abort until the last waiter has heard of it.
int64_t abort_of_four() {
  const auto makers = make_hierarchical(4, [](int r) { return r / 2; });
  std::vector<std::shared_ptr<Group>> groups(4);
  std::atomic<int> waiting{0};
  std::atomic<int64_t> aborted{0};
  std::atomic<int64_t> latest{0};
  run_ranks(4, [&](int rank) {
    const auto group = groups[static_cast<size_t>(rank)] = makers[static_cast<size_t>(rank)]();
    group->barrier(call_of(Op::Barrier, DType::UInt8, 0));
    if (rank == 3) {
      while (waiting < 3) std::this_thread::yield();
      // Awake at first, asleep later: both have to be woken.
      std::this_thread::sleep_for(milliseconds(30));
      aborted = steady_ns();
      group->abort("enough");
      return;
    }
    ++waiting;
    const std::string message = CHECK_THROWS(AbortedError, group->barrier(call_of(Op::Barrier, DType::UInt8, 1)));
    CHECK_CONTAINS(message, "rank 3 (host ");
    const int64_t now = steady_ns();
    for (int64_t seen = latest; seen < now && !latest.compare_exchange_weak(seen, now);) {
    }
  });
  return latest.load() - aborted.load();
}

TEST(an_abort_frees_the_waiters_of_all_nodes_within_100_ms) { testing::check_soon(milliseconds(100), abort_of_four); }

// --- processes -------------------------------------------------------------------------------------------------------

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

/// Keys and times in memory that forked ranks share.
struct Board {
  struct Word {
    std::atomic<bool> ready{false};
    char key[64];
    char value[1024];
  };
  std::atomic<uint32_t> words{0};
  Word word[64];
  std::atomic<int64_t> died{0};
  std::atomic<int64_t> noticed[8];
  char message[8][2000];
};

class BoardKeys final : public KeyValues {
 public:
  explicit BoardKeys(Board& board) : board_(board) {}
  void set(const std::string& key, const std::string& value) override {
    Board::Word& word = board_.word[board_.words.fetch_add(1)];
    std::strncpy(word.key, key.c_str(), sizeof(word.key) - 1);
    std::strncpy(word.value, value.c_str(), sizeof(word.value) - 1);
    word.ready = true;
  }
  std::string get(const std::string& key, Deadline deadline) override {
    while (!deadline.passed()) {
      for (const Board::Word& word : board_.word) {
        if (word.ready && key == word.key) return word.value;
      }
      std::this_thread::yield();
    }
    throw TimeoutError("nobody has set " + key);
  }

 private:
  Board& board_;
};

/// A rank of two nodes with two ranks each. Rank `victim` kills itself in the middle; the others say what they hear.
void live(Board& board, int rank, int victim, size_t count) {
  const auto deadline = Deadline::after(seconds(30));
  const auto keys = std::make_shared<BoardKeys>(board);
  const auto mesh = TcpMesh::join(rank, 4, keys, loopback_config(), deadline);
  keys->set("pid" + std::to_string(rank), std::to_string(::getpid()));
  std::vector<std::string> names;
  for (int r = 0; r < 4; ++r) {
    names.push_back(process_name("here", std::stoi(keys->get("pid" + std::to_string(r), deadline))));
  }
  mesh->introduce(names);
  const std::string place = "memory" + std::to_string(rank / 2);
  std::shared_ptr<NodeSession> session;
  if (rank % 2 == 0) {
    session = NodeSession::create(0, 2, NodeConfig::from_options(2));
    keys->set(place, session->address());
  } else {
    session = NodeSession::open(1, 2, keys->get(place, deadline));
  }
  session->wait_attached(deadline, [] {});
  HierarchicalGroup group(Topology::of({0, 0, 2, 2}), session, mesh);
  std::vector<float> data(count, 1.0f);
  try {
    for (uint64_t seq = 0;; ++seq) {
      if (rank == victim && seq == 5) {
        board.died = steady_ns();
        ::kill(::getpid(), SIGKILL);
      }
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), data.data(), data.data(), count,
                       Reduction{ReduceKind::Avg, 4, 1.0});
    }
  } catch (const PeerError& e) {
    std::strncpy(board.message[rank], e.what(), sizeof(board.message[rank]) - 1);
    board.noticed[rank] = steady_ns();
  }
}

/// Returns the nanoseconds from the death of a rank until the last one has heard of it.
int64_t death_of_a_rank(int victim, size_t count) {
  void* const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  const std::shared_ptr<Board> board(new (memory) Board, [](Board* own) { ::munmap(own, sizeof(Board)); });
  std::vector<pid_t> children;
  for (int rank = 0; rank < 4; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      try {
        live(*board, rank, victim, count);
      } catch (const std::exception& e) {
        std::strncpy(board->message[rank], e.what(), sizeof(board->message[rank]) - 1);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) ::waitpid(child, nullptr, 0);
  int64_t latest = 0;
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim) continue;
    const std::string message = board->message[rank];
    CHECK_CONTAINS(message, "rank " + std::to_string(victim) + " (host ");
    CHECK_CONTAINS(message, "pid " + std::to_string(children[static_cast<size_t>(victim)]) + ") died");
    CHECK_CONTAINS(message, "all_reduce number 5");
    CHECK(board->noticed[rank] > 0);
    latest = std::max<int64_t>(latest, board->noticed[rank] - board->died);
  }
  return latest;
}

TEST(a_killed_rank_is_named_on_all_nodes_within_a_second) {
  // ThreadSanitizer ends forked processes that start threads.
  if (kThreadSanitizer) return;
  for (const size_t count : {size_t{1000}, size_t{1} << 20}) {
    for (const int victim : {0, 1, 3}) {
      testing::check_soon(seconds(1), [&] { return death_of_a_rank(victim, count); });
    }
  }
}

}  // namespace
}  // namespace ours
