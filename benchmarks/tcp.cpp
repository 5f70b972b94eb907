// The time of an all-reduce between ranks of several hosts, the share of the links' rate that it reaches, and the bytes
// that each host sends for it.
//
//   make -f tests/cpp/Makefile tcp        # 2 ranks over the loopback
//   tests/cpp/build/plain/tcp [--local RANKS] [--group flat|nodes] [--hosts HOSTS [--rate MBIT]] [--heap] [--rails N]
//                             [--streams N] [--part BYTES] [--rules RULES]
//                             [--wire bfloat16|float16]
//
// The ranks are forked processes, RANKS on each host. With --hosts, which needs root, each host is a network namespace
// with a link of that rate (tc tbf; 0: unlimited) to a bridge in another namespace; all of them are removed at the end.
// RULES, such as "all ring", come before the built-in table of algorithms. `flat` uses TCP between all ranks; `nodes`
// uses shared memory within a host, and TCP between hosts. With --heap, the data is in the nodes' heaps.
//
// An all-reduce of S bytes over H hosts must send 2 (H - 1) / H S bytes from each host. The share of the line rate is
// the time that this takes at the link's rate, divided by the time taken. The bytes are counted at the hosts'
// interfaces, and given as a share of this minimum. Prints the medians over the repetitions of the slowest rank's time.

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
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "collectives/hierarchical/hierarchical_group.h"
#include "common/error.h"

namespace {

constexpr int kMaxRanks = 32;
constexpr size_t kValueBytes = 2048;
constexpr uint32_t kMaxEntries = 128;

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  _exit(1);
}

struct Entry {
  std::atomic<bool> ready{false};
  char key[64];
  char value[kValueBytes];
};

struct Shared {
  std::atomic<uint32_t> arrived{0};
  double seconds[kMaxRanks];
  uint64_t sent[kMaxRanks];  ///< bytes that have left the rank's host
  std::atomic<uint32_t> used{0};
  Entry entries[kMaxEntries];
};

/// Keys in memory that all ranks map.
class SharedKeys final : public ours::KeyValues {
 public:
  explicit SharedKeys(Shared& shared) : shared_(shared) {}

  void set(const std::string& key, const std::string& value) override {
    Entry& entry = shared_.entries[shared_.used.fetch_add(1) % kMaxEntries];
    std::strncpy(entry.key, key.c_str(), sizeof(entry.key) - 1);
    std::strncpy(entry.value, value.c_str(), sizeof(entry.value) - 1);
    entry.ready.store(true, std::memory_order_release);
  }
  std::string get(const std::string& key, ours::Deadline deadline) override {
    while (true) {
      for (const Entry& entry : shared_.entries) {
        if (entry.ready.load(std::memory_order_acquire) && key == entry.key) return entry.value;
      }
      if (deadline.passed()) throw ours::TimeoutError("nobody has set " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  Shared& shared_;
};

struct Job {
  int hosts = 0;         ///< 0: all ranks are on this host, which plays several nodes
  int local = 1;         ///< ranks on each host
  double rate_mbit = 0;  ///< of each host's link; 0: no limit
  bool nodes = false;    ///< shared memory within a host
  bool heap = false;
  int rails = 0;
  ours::TcpPlan plan;
  Shared* shared = nullptr;

  int groups() const { return hosts == 0 ? 2 : hosts; }
  int ranks() const { return groups() * local; }
  int host_of(int rank) const { return rank / local; }
};

// --- hosts

std::string space_of(int host) { return "ours-bench-" + std::to_string(host); }

/// Runs a command of iproute2; false if it fails.
bool run(const std::string& command) { return std::system((command + " 2>/dev/null").c_str()) == 0; }  // NOLINT

/// Network namespaces, each with a link to a bridge.
class Hosts {
 public:
  explicit Hosts(const Job& job) : hosts_(job.hosts) {
    remove();
    bool good = run("ip netns add ours-bench-net") && run("ip -n ours-bench-net link add bridge0 type bridge") &&
                run("ip -n ours-bench-net link set bridge0 up");
    for (int host = 0; good && host < hosts_; ++host) {
      const std::string space = space_of(host);
      const std::string port = "port" + std::to_string(host);
      const std::string limit =
          " root tbf rate " + std::to_string(static_cast<int>(job.rate_mbit)) + "mbit burst 256kb latency 20ms";
      const bool limited = job.rate_mbit > 0;
      good = run("ip netns add " + space) &&
             run("ip -n " + space + " link add eth0 type veth peer name " + port + " netns ours-bench-net") &&
             run("ip -n " + space + " addr add 10.77.0." + std::to_string(host + 1) + "/24 dev eth0") &&
             run("ip -n " + space + " link set eth0 up") && run("ip -n " + space + " link set lo up") &&
             run("ip -n ours-bench-net link set " + port + " master bridge0 up") &&
             (!limited || run("ip netns exec " + space + " tc qdisc add dev eth0" + limit));
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

/// The bytes that have left through eth0 of this process's network namespace.
uint64_t bytes_sent() {
  std::ifstream file("/proc/self/net/dev");
  for (std::string name; file >> name;) {
    if (name != "eth0:") continue;
    uint64_t value = 0;
    for (int column = 0; column < 9; ++column) file >> value;
    return value;
  }
  return 0;
}

class Rank {
 public:
  Rank(const Job& job, int rank) : job_(job), rank_(rank) {}

  void measure();

 private:
  struct Result {
    double seconds;
    double bytes;  ///< for each host and call
  };

  std::shared_ptr<ours::Group> join();
  void meet();
  Result median_of(ours::Group& group, size_t bytes, int repetitions);

  const Job& job_;
  const int rank_;
  uint32_t meetings_ = 0;
  uint64_t calls_ = 0;
};

std::shared_ptr<ours::Group> Rank::join() {
  const auto deadline = ours::Deadline::after(std::chrono::seconds(30));
  const auto keys = std::make_shared<SharedKeys>(*job_.shared);
  ours::TcpConfig config;
  config.interface = job_.hosts > 0 ? "eth0" : "127.0.0.1";
  config.plan = job_.plan;
  const auto mesh = ours::TcpMesh::join(rank_, job_.ranks(), keys, config, deadline);
  if (!job_.nodes) return std::make_shared<ours::TcpGroup>(mesh);
  std::vector<int> leaders;
  for (int r = 0; r < job_.ranks(); ++r) leaders.push_back(r / job_.local * job_.local);
  const int host = job_.host_of(rank_);
  const std::string key = "memory" + std::to_string(host);
  std::shared_ptr<ours::NodeSession> session;
  if (rank_ % job_.local == 0) {
    session = ours::NodeSession::create(0, job_.local, ours::NodeConfig::from_options(job_.local));
    keys->set(key, session->address());
  } else {
    session = ours::NodeSession::open(rank_ % job_.local, job_.local, keys->get(key, deadline));
  }
  session->wait_attached(deadline, [] {});
  ours::HierarchicalGroup::Plan plan;
  plan.rails = job_.rails;
  return std::make_shared<ours::HierarchicalGroup>(ours::Topology::of(leaders), session, mesh, plan);
}

void Rank::meet() {
  const uint32_t all = ++meetings_ * static_cast<uint32_t>(job_.ranks());
  job_.shared->arrived.fetch_add(1);
  while (job_.shared->arrived.load() < all) sched_yield();
}

Rank::Result Rank::median_of(ours::Group& group, size_t bytes, int repetitions) {
  const size_t count = bytes / sizeof(float);
  std::shared_ptr<void> heap = job_.heap ? group.allocate(bytes) : nullptr;
  std::vector<float> own(heap ? 0 : count);
  auto* const data = heap ? static_cast<float*>(heap.get()) : own.data();
  std::vector<double> slowest;
  uint64_t sent = 0;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    std::fill(data, data + count, rank_ == 0 ? 1.0f : 0.0f);
    meet();
    const uint64_t before = bytes_sent();
    const auto start = ours::Clock::now();
    const ours::Call call{ours::Op::AllReduce, ours::DType::Float32, calls_++,
                          ours::Deadline::after(std::chrono::minutes(1))};
    group.all_reduce(call, data, data, count, ours::Reduction{ours::ReduceKind::Sum, job_.ranks(), 1.0});
    const std::chrono::duration<double> taken = ours::Clock::now() - start;
    job_.shared->seconds[rank_] = taken.count();
    meet();
    sent += bytes_sent() - before;
    slowest.push_back(*std::max_element(job_.shared->seconds, job_.shared->seconds + job_.ranks()));
    if (std::count(data, data + count, 1.0f) != static_cast<std::ptrdiff_t>(count)) give_up("wrong sum");
    meet();
  }
  job_.shared->sent[rank_] = sent;
  meet();
  uint64_t most = 0;
  for (int r = 0; r < job_.ranks(); ++r) most = std::max(most, job_.shared->sent[r]);
  meet();
  std::sort(slowest.begin(), slowest.end());
  return {slowest[slowest.size() / 2], static_cast<double>(most) / repetitions};
}

void Rank::measure() {
  const std::shared_ptr<ours::Group> group = join();
  median_of(*group, 4096, 20);
  median_of(*group, size_t{25} << 20, 2);
  for (const size_t bytes : {size_t{4} << 10, size_t{64} << 10, size_t{1} << 20, size_t{25} << 20}) {
    const bool large = bytes > size_t{4} << 20;
    const Result result = median_of(*group, bytes, large ? (job_.rate_mbit > 0 ? 7 : 21) : 201);
    if (rank_ != 0) continue;
    const double least = 2.0 * (job_.groups() - 1) / job_.groups() * static_cast<double>(bytes);
    std::printf("  %9zu bytes %10.1f us", bytes, result.seconds * 1e6);
    if (job_.rate_mbit > 0) {
      std::printf("  %5.1f %% of the line rate", 100 * least * 8 / (job_.rate_mbit * 1e6) / result.seconds);
    }
    if (job_.hosts > 0) std::printf("  %5.1f %% of the least bytes", 100 * result.bytes / least);
    std::printf("\n");
    std::fflush(stdout);
  }
  meet();
}

int run_all(const Job& job) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < job.ranks(); ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        if (job.hosts > 0) Hosts::enter(job.host_of(rank));
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
    // The other ranks would wait for it.
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
  const auto refuse = [&](const std::string& word) {
    give_up("unknown: '" + word + "'; see the beginning of tcp.cpp");
  };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--heap") {
      job.heap = true;
      continue;
    }
    if (i + 1 == argc) refuse(word);
    const std::string value = argv[++i];
    const double number = std::atof(value.c_str());
    if (word == "--hosts") {
      job.hosts = static_cast<int>(number);
    } else if (word == "--local") {
      job.local = static_cast<int>(number);
    } else if (word == "--rate") {
      job.rate_mbit = number;
    } else if (word == "--group") {
      job.nodes = value == "nodes";
    } else if (word == "--rails") {
      job.rails = static_cast<int>(number);
    } else if (word == "--streams") {
      job.plan.streams = std::clamp(static_cast<int>(number), 1, 16);
    } else if (word == "--part") {
      job.plan.chunk_bytes = std::max(static_cast<size_t>(number) / 64 * 64, size_t{4096});
    } else if (word == "--wire") {
      if (value == "bfloat16") job.plan.wire = ours::WireType::BFloat16;
      if (value == "float16") job.plan.wire = ours::WireType::Float16;
    } else if (word == "--rules") {
      job.plan.rules = ours::Selection::parse(value).rules();
    } else {
      refuse(word);
    }
  }
  if (job.local < 1 || job.ranks() < 1 || job.ranks() > kMaxRanks) give_up("the number of ranks must be 1 to 32");
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up("cannot map memory");
  job.shared = new (memory) Shared;
  std::printf("all-reduce, %s, %d x %d ranks, %s%s, %d streams, parts of %zu bytes\n",
              job.nodes ? "shared memory and TCP" : "TCP", job.groups(), job.local,
              job.hosts > 0 ? "a host each" : "loopback",
              job.rate_mbit > 0 ? (" at " + std::to_string(static_cast<int>(job.rate_mbit)) + " Mbit/s").c_str() : "",
              job.plan.streams, job.plan.chunk_bytes);
  std::fflush(stdout);
  if (job.hosts == 0) return run_all(job);
  const Hosts network(job);
  return run_all(job);
}
