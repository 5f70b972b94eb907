// The lower bound for the time of an all-reduce on this machine, and the time that csrc/ takes, measured in turns.
//
//   make -f tests/cpp/Makefile floor      # 4 ranks, 25 MiB
//   tests/cpp/build/plain/floor RANKS BYTES [REPETITIONS]
//
// The ranks are forked processes. The lower bound ("floor") is the loop of zero_copy.h. Group::all_reduce does the same
// in memory of the heap, and has to copy ordinary memory through the segment. Prints the medians over the repetitions
// of the slowest rank's time.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "collectives/node/node_group.h"
#include "zero_copy.h"

namespace {

using ours::Clock;
using Session = std::shared_ptr<ours::NodeSession>;

constexpr int kMaxRanks = 64;

struct Shared {
  zero_copy::Turn turns[kMaxRanks];
  double seconds[kMaxRanks];
};

struct Job {
  int ranks;
  size_t count;  // floats of a buffer
  int repetitions;
  Shared* shared;
  float* buffers;  // ranks * count

  float* buffer(int rank) const { return buffers + static_cast<size_t>(rank) * count; }
};

[[noreturn]] void give_up(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  _exit(1);
}

void* map_shared(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up("cannot map the buffers");
  return memory;
}

class Rank {
 public:
  Rank(const Job& job, int rank)
      : job_(job), rank_(rank), floor_{job.ranks, rank, job.count, job.shared->turns, job.buffers} {}

  /// Measures all ways in turns, and returns the median of each in seconds.
  std::vector<double> measure(const Session& session);

 private:
  struct Way {
    float* buffer;
    std::function<void()> act;
    std::vector<double> slowest;
  };

  void time(Way& way);

  const Job& job_;
  const int rank_;
  const zero_copy::Job floor_;
};

void Rank::time(Way& way) {
  // The sum is one, so that the numbers stay finite.
  std::fill_n(way.buffer, job_.count, rank_ == 0 ? 1.0f : 0.0f);
  zero_copy::meet(floor_);
  const auto start = Clock::now();
  way.act();
  const std::chrono::duration<double> taken = Clock::now() - start;
  job_.shared->seconds[rank_] = taken.count();
  zero_copy::meet(floor_);
  way.slowest.push_back(*std::max_element(job_.shared->seconds, job_.shared->seconds + job_.ranks));
  if (std::count(way.buffer, way.buffer + job_.count, 1.0f) != static_cast<std::ptrdiff_t>(job_.count)) {
    give_up("wrong sum");
  }
  zero_copy::meet(floor_);
}

std::vector<double> Rank::measure(const Session& session) {
  const auto minute = [] { return ours::Deadline::after(std::chrono::minutes(1)); };
  session->wait_attached(minute(), [] {});
  ours::NodeGroup group(session);
  const std::shared_ptr<void> heap = group.allocate(job_.count * sizeof(float));
  if (!heap) give_up("this system has no memory to share");
  std::vector<float> ordinary(job_.count);
  uint64_t calls = 0;
  const auto all_reduce = [&](float* buffer) {
    const ours::Call call{ours::Op::AllReduce, ours::DType::Float32, calls++, minute()};
    group.all_reduce(call, buffer, buffer, job_.count, ours::Reduction{});
  };
  auto* const in_heap = static_cast<float*>(heap.get());
  std::vector<Way> ways{{job_.buffer(rank_), [&] { zero_copy::all_reduce(floor_); }, {}},
                        {in_heap, [&] { all_reduce(in_heap); }, {}},
                        {ordinary.data(), [&] { all_reduce(ordinary.data()); }, {}}};
  for (int repetition = 0; repetition < job_.repetitions; ++repetition) {
    for (Way& way : ways) time(way);
  }
  std::vector<double> medians;
  for (Way& way : ways) {
    const auto middle = way.slowest.begin() + static_cast<std::ptrdiff_t>(way.slowest.size() / 2);
    std::nth_element(way.slowest.begin(), middle, way.slowest.end());
    medians.push_back(*middle);
  }
  return medians;
}

}  // namespace

int main(int argc, char** argv) {
  Job job{};
  job.ranks = argc > 1 ? std::clamp(std::atoi(argv[1]), 1, kMaxRanks) : 4;
  const size_t bytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : size_t{25} << 20;
  job.count = std::max<size_t>(bytes / sizeof(float), 1);
  job.repetitions = argc > 3 ? std::max(std::atoi(argv[3]), 1) : 50;
  job.shared = new (map_shared(sizeof(Shared))) Shared;
  job.buffers = static_cast<float*>(map_shared(static_cast<size_t>(job.ranks) * job.count * sizeof(float)));
  const Session leader = ours::NodeSession::create(0, job.ranks, ours::NodeConfig::from_options(job.ranks));
  const std::string address = leader->address();
  for (int rank = 1; rank < job.ranks; ++rank) {
    if (fork() == 0) {
      Rank(job, rank).measure(ours::NodeSession::open(rank, job.ranks, address));
      _exit(0);
    }
  }
  const std::vector<double> medians = Rank(job, 0).measure(leader);
  for (int status = 0; wait(&status) > 0;) {
    if (status != 0) return 1;
  }
  std::printf("all-reduce of %zu bytes, %d ranks\n", job.count * sizeof(float), job.ranks);
  std::printf("  floor                 %10.1f us\n", medians[0] * 1e6);
  std::printf("  ours, heap            %10.1f us  %.2f of the floor\n", medians[1] * 1e6, medians[1] / medians[0]);
  std::printf("  ours, ordinary memory %10.1f us  %.2f of the floor\n", medians[2] * 1e6, medians[2] / medians[0]);
  return 0;
}
