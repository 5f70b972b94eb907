// The time of an all-reduce over TCP between ranks of this host, without Python and without peers.
// benchmarks/between_hosts.py measures it between hosts, with links of a given rate.
//
//   make -f tests/cpp/Makefile tcp        # 2 ranks
//   tests/cpp/build/plain/tcp [--nodes NODES] [--local RANKS] [--group flat|nodes] [--heap] [--rails N] [--streams N]
//                             [--part BYTES] [--rules RULES] [--wire bfloat16|float16]
//
// The ranks are forked processes, RANKS for each of the NODES that this host plays. RULES, such as "all ring", come
// before the built-in table of algorithms. `flat` uses TCP between all ranks; `nodes` uses shared memory within a node,
// and TCP between nodes. With --heap, the data is in the nodes' heaps. Prints the medians over the repetitions of the
// slowest rank's time.

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
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "collectives/hierarchical/hierarchical_group.h"
#include "common/error.h"

namespace {

constexpr int kMaxRanks = 256;
constexpr size_t kValueBytes = 2048;
constexpr uint32_t kMaxEntries = 1024;

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
  int nodes = 2;
  int local = 1;               ///< ranks on each node
  bool shares_memory = false;  ///< within a node
  bool heap = false;
  int rails = 0;
  ours::TcpPlan plan;
  Shared* shared = nullptr;

  int ranks() const { return nodes * local; }
};

class Rank {
 public:
  Rank(const Job& job, int rank) : job_(job), rank_(rank) {}

  void measure();

 private:
  std::shared_ptr<ours::Group> join();
  void meet();
  /// Of the rank that takes longest; the same on all ranks.
  double time_of(ours::Group& group, float* data, size_t count);
  double median_of(ours::Group& group, size_t bytes);

  const Job& job_;
  const int rank_;
  uint32_t meetings_ = 0;
  uint64_t calls_ = 0;
};

std::shared_ptr<ours::Group> Rank::join() {
  const auto deadline = ours::Deadline::after(std::chrono::minutes(1));
  const auto keys = std::make_shared<SharedKeys>(*job_.shared);
  ours::TcpConfig config;
  config.interface = "127.0.0.1";
  config.plan = job_.plan;
  const auto mesh = ours::TcpMesh::join(rank_, job_.ranks(), keys, config, deadline);
  if (!job_.shares_memory) return std::make_shared<ours::TcpGroup>(mesh);
  std::vector<int> leaders;
  for (int r = 0; r < job_.ranks(); ++r) leaders.push_back(r / job_.local * job_.local);
  const std::string key = "memory" + std::to_string(rank_ / job_.local);
  std::shared_ptr<ours::NodeSession> session;
  if (rank_ % job_.local == 0) {
    session = ours::NodeSession::create(0, job_.local, ours::NodeConfig::from_options(job_.local));
    keys->set(key, session->address());
  } else {
    session = ours::NodeSession::open(rank_ % job_.local, job_.local, keys->get(key, deadline));
  }
  session->wait_attached(deadline, [] {});
  return std::make_shared<ours::HierarchicalGroup>(ours::Topology::of(leaders), session, mesh,
                                                   ours::HierarchicalLimits{job_.rails});
}

void Rank::meet() {
  const uint32_t all = ++meetings_ * static_cast<uint32_t>(job_.ranks());
  job_.shared->arrived.fetch_add(1);
  while (job_.shared->arrived.load() < all) sched_yield();
}

double Rank::time_of(ours::Group& group, float* data, size_t count) {
  std::fill(data, data + count, rank_ == 0 ? 1.0f : 0.0f);
  meet();
  const auto start = ours::Clock::now();
  const ours::Call call{ours::Op::AllReduce, ours::DType::Float32, calls_++,
                        ours::Deadline::after(std::chrono::minutes(1))};
  group.all_reduce(call, data, data, count, ours::Reduction{ours::ReduceKind::Sum, job_.ranks(), 1.0});
  const std::chrono::duration<double> taken = ours::Clock::now() - start;
  job_.shared->seconds[rank_] = taken.count();
  meet();
  const double slowest = *std::max_element(job_.shared->seconds, job_.shared->seconds + job_.ranks());
  if (std::count(data, data + count, 1.0f) != static_cast<std::ptrdiff_t>(count)) give_up("wrong sum");
  meet();
  return slowest;
}

double Rank::median_of(ours::Group& group, size_t bytes) {
  constexpr double kSeconds = 1;
  constexpr double kLeast = 7, kMost = 201;
  const size_t count = bytes / sizeof(float);
  std::shared_ptr<void> heap = job_.heap ? group.allocate(bytes) : nullptr;
  std::vector<float> own(heap ? 0 : count);
  auto* const data = heap ? static_cast<float*>(heap.get()) : own.data();
  time_of(group, data, count);  // of memory that is new
  const double usual = std::max(time_of(group, data, count), 1e-6);
  std::vector<double> slowest(static_cast<size_t>(std::clamp(kSeconds / usual, kLeast, kMost)));
  for (double& one : slowest) one = time_of(group, data, count);
  std::sort(slowest.begin(), slowest.end());
  return slowest[slowest.size() / 2];
}

void Rank::measure() {
  const std::shared_ptr<ours::Group> group = join();
  for (const size_t bytes : {size_t{4} << 10, size_t{64} << 10, size_t{1} << 20, size_t{25} << 20}) {
    const double seconds = median_of(*group, bytes);
    if (rank_ != 0) continue;
    std::printf("  %9zu bytes %10.1f us\n", bytes, seconds * 1e6);
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
    if (word == "--nodes") {
      job.nodes = static_cast<int>(number);
    } else if (word == "--local") {
      job.local = static_cast<int>(number);
    } else if (word == "--group") {
      job.shares_memory = value == "nodes";
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
  if (job.local < 1 || job.ranks() < 1 || job.ranks() > kMaxRanks) give_up("the number of ranks must be 1 to 256");
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up("cannot map memory");
  job.shared = new (memory) Shared;
  std::printf("all-reduce, %s, %d x %d ranks, %d streams, parts of %zu bytes\n",
              job.shares_memory ? "shared memory and TCP" : "TCP", job.nodes, job.local, job.plan.streams,
              job.plan.chunk_bytes);
  std::fflush(stdout);
  return run_all(job);
}
