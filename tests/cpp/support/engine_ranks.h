#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/tcp_ranks.h"
#include "transport/engine.h"

namespace ours::testing {

/// Carries what the engines of ranks that are threads send each other. Payloads are copied from memory to memory some
/// time after both ends have begun: by a thread of its own or, if it `polls`, by the thread that asks.
class Switchboard {
 public:
  struct End {
    uint32_t number;
    void* data;
    size_t bytes;
    bool done = false;
  };
  using EndPtr = std::shared_ptr<End>;

  explicit Switchboard(bool polls);
  ~Switchboard();

  bool polls() const { return polls_; }

  /// From now on nothing arrives any more, and a rank that asks hears nothing.
  void hold();
  /// Once this many more messages have arrived, everything that `rank` does with its engine throws.
  void fail_after(int messages, int rank);
  /// The number of messages that have arrived.
  size_t arrived();
  /// From whom to whom all messages went that were begun, and their bytes.
  std::vector<std::tuple<int, int, size_t>> sent();
  /// The number of messages that have been begun, and have neither ended nor arrived.
  size_t under_way();

  void begin(int from, int to, bool sends, const EndPtr& end);
  bool done(int rank, int from, int to, const EndPtr& end);
  void drop(int from, int to, const EndPtr& end);
  void set_waker(int rank, std::function<void()> wake);

 private:
  struct Pair {
    std::deque<EndPtr> sent;
    std::deque<EndPtr> wanted;
  };

  void check(int rank) const;
  bool deliver(Pair& pair);
  void deliver_until_stopped();

  const bool polls_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, Pair> pairs_;
  std::map<int, std::function<void()>> wakers_;
  std::mt19937 random_{7};
  bool held_ = false;
  bool stopped_ = false;
  int left_ = -1;
  int failing_ = -1;
  size_t arrived_ = 0;
  std::vector<std::tuple<int, int, size_t>> sent_;
  std::thread thread_;
};

std::shared_ptr<Engine> make_engine(int rank, const std::shared_ptr<Switchboard>& board);

/// Gives the ranks' meshes engines that carry payloads of at least `least_bytes`.
std::shared_ptr<Switchboard> connect_engines(const Meshes& meshes, bool polls, size_t least_bytes = 64);

}  // namespace ours::testing
