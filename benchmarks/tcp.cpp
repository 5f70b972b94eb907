// How long an all-reduce over TCP takes, and how much of a link's rate it reaches.
//
//   make -f tests/cpp/Makefile tcp        # 2 ranks over the loopback, 64 KiB and 25 MiB
//   tests/cpp/build/plain/tcp [RANKS [STREAMS [CHUNK_BYTES [SMALL_BYTES [DIRECT_RANKS]]]]]
//   tests/cpp/build/plain/tcp --hosts RANKS RATE_MBIT [STREAMS [CHUNK_BYTES [SMALL_BYTES [DIRECT_RANKS]]]]
//
// The ranks are forked processes. With --hosts, which root alone may ask for, each is on a host of its own: a network
// namespace with one link of that rate (tc tbf) to a bridge in another. They are removed in the end. An all-reduce of S
// bytes over H hosts must send 2 (H - 1) / H S bytes from each; the share of the line rate is the time that this takes
// at the rate of the link, over the time taken. Prints the medians over the repetitions of the slowest rank's time.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "collectives/tcp_group.h"
#include "common/error.h"

namespace {

constexpr int kMaxRanks = 32;
constexpr size_t kKeyBytes = 2048;

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  _exit(1);
}

struct Shared {
  std::atomic<uint32_t> arrived{0};
  double seconds[kMaxRanks];
  std::atomic<bool> set[kMaxRanks + 1];  ///< keys: a card a rank, then the terms
  char keys[kMaxRanks + 1][kKeyBytes];
};

/// The keys of the group, in memory that all ranks map.
class SharedKeys final : public ours::KeyValues {
 public:
  explicit SharedKeys(Shared& shared) : shared_(shared) {}

  void set(const std::string& key, const std::string& value) override {
    const size_t place = place_of(key);
    std::strncpy(shared_.keys[place], value.c_str(), kKeyBytes - 1);
    shared_.set[place].store(true, std::memory_order_release);
  }
  std::string get(const std::string& key, ours::Deadline deadline) override {
    const size_t place = place_of(key);
    while (!shared_.set[place].load(std::memory_order_acquire)) {
      if (deadline.passed()) throw ours::TimeoutError("nobody has set " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return shared_.keys[place];
  }

 private:
  static size_t place_of(const std::string& key) {
    const std::string card = ours::card_key(0).substr(0, ours::card_key(0).size() - 1);
    if (key.compare(0, card.size(), card) != 0) return kMaxRanks;
    return static_cast<size_t>(std::atoi(key.c_str() + card.size()));
  }

  Shared& shared_;
};

struct Job {
  int ranks = 2;
  double rate_mbit = 0;  ///< of each host's link; 0: all ranks are on this host
  ours::TcpPlan plan;
  Shared* shared = nullptr;
};

// --- hosts
// ------------------------------------------------------------------------------------------------------------

std::string space_of(int host) { return "ours-bench-" + std::to_string(host); }

/// Runs a command of iproute2; false if it fails.
bool run(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()) == 0; }  // NOLINT

/// Network namespaces with a link each to a bridge.
class Hosts {
 public:
  explicit Hosts(const Job& job) : hosts_(job.ranks) {
    remove();
    bool good = run("ip netns add ours-bench-net") && run("ip -n ours-bench-net link add bridge0 type bridge") &&
                run("ip -n ours-bench-net link set bridge0 up");
    for (int host = 0; good && host < hosts_; ++host) {
      const std::string space = space_of(host);
      const std::string port = "port" + std::to_string(host);
      const std::string limit =
          " root tbf rate " + std::to_string(static_cast<int>(job.rate_mbit)) + "mbit burst 256kb latency 20ms";
      good = run("ip netns add " + space) &&
             run("ip -n " + space + " link add eth0 type veth peer name " + port + " netns ours-bench-net") &&
             run("ip -n " + space + " addr add 10.77.0." + std::to_string(host + 1) + "/24 dev eth0") &&
             run("ip -n " + space + " link set eth0 up") && run("ip -n " + space + " link set lo up") &&
             run("ip -n ours-bench-net link set " + port + " master bridge0 up") &&
             run("ip netns exec " + space + " tc qdisc add dev eth0" + limit);
    }
    if (good) return;
    remove();
    give_up("cannot make network namespaces: that takes root, iproute2 and tc");
  }
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;
  ~Hosts() { remove(); }

  static void enter(int host) {
    const int fd = ::open(("/var/run/netns/" + space_of(host)).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::setns(fd, CLONE_NEWNET) != 0) give_up("cannot enter " + space_of(host));
    ::close(fd);
  }

 private:
  void remove() const {
    for (int host = 0; host < hosts_; ++host) run("ip netns del " + space_of(host));
    run("ip netns del ours-bench-net");
  }

  int hosts_;
};

// --- measuring
// --------------------------------------------------------------------------------------------------------

class Rank {
 public:
  Rank(const Job& job, int rank) : job_(job), rank_(rank) {}

  void measure();

 private:
  void meet();
  double median_of(ours::Group& group, size_t bytes, int repetitions);

  const Job& job_;
  const int rank_;
  uint32_t meetings_ = 0;
  uint64_t calls_ = 0;
};

void Rank::meet() {
  const uint32_t all = ++meetings_ * static_cast<uint32_t>(job_.ranks);
  job_.shared->arrived.fetch_add(1);
  while (job_.shared->arrived.load() < all) sched_yield();
}

double Rank::median_of(ours::Group& group, size_t bytes, int repetitions) {
  std::vector<float> data(bytes / sizeof(float));
  std::vector<double> slowest;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    std::fill(data.begin(), data.end(), rank_ == 0 ? 1.0f : 0.0f);
    meet();
    const auto start = ours::Clock::now();
    const ours::Call call{ours::Op::AllReduce, ours::DType::Float32, calls_++,
                          ours::Deadline::after(std::chrono::minutes(1))};
    group.all_reduce(call, data.data(), data.data(), data.size(),
                     ours::Reduction{ours::ReduceKind::Sum, job_.ranks, 1.0});
    const std::chrono::duration<double> taken = ours::Clock::now() - start;
    job_.shared->seconds[rank_] = taken.count();
    meet();
    slowest.push_back(*std::max_element(job_.shared->seconds, job_.shared->seconds + job_.ranks));
    if (std::count(data.begin(), data.end(), 1.0f) != static_cast<std::ptrdiff_t>(data.size())) give_up("wrong sum");
    meet();
  }
  std::sort(slowest.begin(), slowest.end());
  return slowest[slowest.size() / 2];
}

void Rank::measure() {
  ours::TcpConfig config;
  config.interface = job_.rate_mbit > 0 ? "eth0" : "127.0.0.1";
  config.plan = job_.plan;
  ours::TcpGroup group(ours::TcpMesh::join(rank_, job_.ranks, std::make_shared<SharedKeys>(*job_.shared), config,
                                           ours::Deadline::after(std::chrono::seconds(30))));
  median_of(group, 4096, 20);
  median_of(group, size_t{25} << 20, 2);
  for (const size_t bytes : {size_t{4} << 10, size_t{64} << 10, size_t{1} << 20, size_t{25} << 20}) {
    const bool large = bytes > size_t{4} << 20;
    const double median = median_of(group, bytes, large ? (job_.rate_mbit > 0 ? 7 : 21) : 201);
    if (rank_ != 0) continue;
    std::printf("  %9zu bytes %10.1f us", bytes, median * 1e6);
    if (job_.rate_mbit > 0) {
      const double least =
          2.0 * (job_.ranks - 1) / job_.ranks * static_cast<double>(bytes) * 8 / (job_.rate_mbit * 1e6);
      std::printf("  %5.1f %% of the line rate", 100 * least / median);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

int run_all(const Job& job) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < job.ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        if (job.rate_mbit > 0) Hosts::enter(rank);
        Rank(job, rank).measure();
      } catch (const std::exception& e) {
        give_up(e.what());
      }
      _exit(0);
    }
    children.push_back(child);
  }
  int result = 0;
  for (size_t ended = 0; ended < children.size(); ++ended) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    // The others would wait for it.
    if (result == 0) {
      for (const pid_t child : children) ::kill(child, SIGTERM);
    }
    result = 1;
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Job job;
  const bool hosts = argc > 1 && std::strcmp(argv[1], "--hosts") == 0;
  int next = hosts ? 2 : 1;
  const auto number = [&](double otherwise) { return next < argc ? std::atof(argv[next++]) : (++next, otherwise); };
  job.ranks = std::clamp(static_cast<int>(number(2)), 1, kMaxRanks);
  if (hosts) job.rate_mbit = std::max(number(1000), 1.0);
  job.plan.streams = std::clamp(static_cast<int>(number(job.plan.streams)), 1, 16);
  job.plan.chunk_bytes = std::max(static_cast<size_t>(number(static_cast<double>(job.plan.chunk_bytes))), size_t{4096});
  job.plan.small_bytes = static_cast<size_t>(number(static_cast<double>(job.plan.small_bytes)));
  job.plan.direct_ranks = std::max(static_cast<int>(number(job.plan.direct_ranks)), 1);
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up("cannot map memory");
  job.shared = new (memory) Shared;
  std::printf("all-reduce over TCP, %d ranks, %s, %d streams, parts of %zu bytes\n", job.ranks,
              hosts ? "a host each" : "loopback", job.plan.streams, job.plan.chunk_bytes);
  std::fflush(stdout);
  if (!hosts) return run_all(job);
  const Hosts network(job);
  return run_all(job);
}
