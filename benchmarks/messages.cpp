// A message from one rank to another of its node, without Python: in the way that csrc/ chooses, in the ways that it
// chooses from, and through a ring that is written by hand, measured in turns.
//
//   make -f tests/cpp/Makefile messages      # a table of sizes
//   tests/cpp/build/plain/messages BYTES [REPETITIONS]
//
// Two forked processes send a message back and forth, each of data that it has written just before. Prints half the
// time of that, the median over the repetitions.

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "collectives/messages/point_to_point.h"
#include "collectives/node/node_messages.h"
#include "zero_copy.h"

namespace {

using ours::Clock;
using ours::Setting;

constexpr size_t kRing = size_t{256} << 10;
constexpr size_t kPart = size_t{32} << 10;

/// The ring by hand, from one of the two to the other. Positions count all bytes ever moved.
struct Ring {
  alignas(64) std::atomic<size_t> written{0};
  alignas(64) std::atomic<size_t> read{0};
  alignas(4096) std::byte data[kRing];

  void send(const std::byte* from, size_t bytes) {
    in_parts(written, bytes, [&](size_t position, size_t at, size_t n) {
      while (position + n - read.load(std::memory_order_acquire) > kRing) sched_yield();
      std::memcpy(data + position % kRing, from + at, n);
    });
  }
  void receive(std::byte* to, size_t bytes) {
    in_parts(read, bytes, [&](size_t position, size_t at, size_t n) {
      while (written.load(std::memory_order_acquire) < position + n) sched_yield();
      std::memcpy(to + at, data + position % kRing, n);
    });
  }

 private:
  /// A message begins at a multiple of kPart, so that no part crosses the end of the ring.
  template <class Move>
  static void in_parts(std::atomic<size_t>& moved, size_t bytes, Move&& move) {
    const size_t begin = (moved.load(std::memory_order_relaxed) + kPart - 1) / kPart * kPart;
    for (size_t at = 0; at < bytes; at += kPart) {
      const size_t n = std::min(kPart, bytes - at);
      move(begin + at, at, n);
      moved.store(begin + at + n, std::memory_order_release);
    }
  }
};

struct Shared {
  zero_copy::Turn turns[2];
  Ring rings[2];  // by sender
};

[[noreturn]] void give_up(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  _exit(1);
}

/// How ranks send in one of the columns.
struct Way {
  const char* name;
  Setting around;
  bool direct;  ///< the receiver may read in the sender's memory
};

constexpr Way kWays[] = {{"chosen", Setting::Auto, true},
                         {"cached", Setting::Off, false},
                         {"around", Setting::On, false},
                         {"by hand", Setting::Off, false}};
constexpr size_t kColumns = sizeof(kWays) / sizeof(kWays[0]);
constexpr size_t kByHand = kColumns - 1;

/// Aligned as torch aligns tensors. memcpy is ten times as slow on some processors if what it writes lies up to 31
/// bytes further in its page than what it reads.
struct Buffer {
  explicit Buffer(size_t bytes) : bytes(bytes), memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free) {
    if (!memory) give_up("no memory");
  }
  std::byte* begin() const { return static_cast<std::byte*>(memory.get()); }
  std::byte* end() const { return begin() + bytes; }

  const size_t bytes;
  const std::unique_ptr<void, void (*)(void*)> memory;
};

class Rank {
 public:
  Rank(Shared& shared, int rank) : shared_(shared), rank_(rank), meeting_{2, rank, 0, shared.turns, nullptr} {}

  void open(const std::vector<std::shared_ptr<ours::NodeSession>>& sessions);
  /// Half the median time of sending forth and back, in microseconds, for each way.
  std::vector<double> measure(size_t bytes, int repetitions);
  void close();

 private:
  void send(size_t way, const Buffer& data);
  void receive(size_t way, const Buffer& data);

  Shared& shared_;
  const int rank_;
  const zero_copy::Job meeting_;
  const ours::TransferLimitPtr limit_ = std::make_shared<ours::TransferLimit>(std::chrono::minutes(5));
  std::vector<std::shared_ptr<ours::PointToPoint>> messages_;  // by way
};

void Rank::open(const std::vector<std::shared_ptr<ours::NodeSession>>& sessions) {
  for (size_t way = 0; way < kByHand; ++way) {
    sessions[way]->wait_attached(ours::Deadline::after(std::chrono::minutes(1)), [] {});
    messages_.push_back(ours::make_node_point_to_point(sessions[way], kWays[way].around));
  }
}

void Rank::send(size_t way, const Buffer& data) {
  if (way == kByHand) return shared_.rings[rank_].send(data.begin(), data.bytes);
  auto& messages = *messages_[way];
  messages.wait(*messages.send({data.begin(), data.bytes}, ours::DType::UInt8, 1 - rank_, 0, limit_, {}));
}

void Rank::receive(size_t way, const Buffer& data) {
  if (way == kByHand) return shared_.rings[1 - rank_].receive(data.begin(), data.bytes);
  auto& messages = *messages_[way];
  messages.wait(*messages.recv({data.begin(), data.bytes}, ours::DType::UInt8, 1 - rank_, 0, limit_, {}));
}

std::vector<double> Rank::measure(size_t bytes, int repetitions) {
  const Buffer outgoing(bytes), incoming(bytes);
  std::vector<std::vector<double>> times(kColumns);
  for (int i = 0; i < repetitions; ++i) {
    for (size_t way = 0; way < kColumns; ++way) {
      std::fill(outgoing.begin(), outgoing.end(), static_cast<std::byte>(i + rank_));
      zero_copy::meet(meeting_);
      const auto start = Clock::now();
      if (rank_ == 0) send(way, outgoing);
      receive(way, incoming);
      if (rank_ == 1) send(way, outgoing);
      times[way].push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 2);
      const auto sent = static_cast<std::byte>(i + 1 - rank_);
      if (std::count(incoming.begin(), incoming.end(), sent) != static_cast<std::ptrdiff_t>(bytes)) {
        give_up("wrong message");
      }
      zero_copy::meet(meeting_);
    }
  }
  std::vector<double> medians;
  for (auto& all : times) {
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    std::nth_element(all.begin(), middle, all.end());
    medians.push_back(*middle);
  }
  return medians;
}

void Rank::close() {
  for (const auto& messages : messages_) messages->close();
}

std::string show(size_t bytes) {
  for (const auto& [unit, name] : {std::pair(size_t{1} << 20, " MiB"), {size_t{1} << 10, " KiB"}}) {
    if (bytes >= unit && bytes % unit == 0) return std::to_string(bytes / unit) + name;
  }
  return std::to_string(bytes) + " B";
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<size_t> sizes{4, 4096, 65536, 262144, 1 << 20, 4 << 20, 25 << 20};
  if (argc > 1) sizes = {std::max<size_t>(std::strtoull(argv[1], nullptr, 10), 1)};
  const int asked = argc > 2 ? std::max(std::atoi(argv[2]), 1) : 0;

  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up("cannot map the ring");
  auto* const shared = new (memory) Shared;
  std::vector<std::shared_ptr<ours::NodeSession>> sessions;
  for (size_t way = 0; way < kByHand; ++way) {
    ours::NodeConfig config = ours::NodeConfig::from_options(2);
    config.direct = config.direct && kWays[way].direct;
    sessions.push_back(ours::NodeSession::create(0, 2, config));
  }
  const int rank = fork() == 0 ? 1 : 0;
  if (rank == 1) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // it would wait in the ring for ever
    for (auto& session : sessions) session = ours::NodeSession::open(1, 2, session->address());
  } else {
    std::printf("%-8s", "size");
    for (const Way& way : kWays) std::printf("%12s", way.name);
    std::printf("\n");
  }
  Rank self(*shared, rank);
  self.open(sessions);
  for (const size_t bytes : sizes) {
    const int many = static_cast<int>(std::clamp((size_t{256} << 20) / bytes, size_t{40}, size_t{3000}));
    const std::vector<double> medians = self.measure(bytes, asked != 0 ? asked : many);
    if (rank == 1) continue;
    std::printf("%-8s", show(bytes).c_str());
    for (const double median : medians) std::printf("%9.1f us", median);
    std::printf("\n");
  }
  self.close();
  if (rank == 1) _exit(0);
  for (int status = 0; wait(&status) > 0;) {
    if (status != 0) return 1;
  }
  return 0;
}
