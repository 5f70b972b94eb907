// The least time that an all-reduce can take on this machine, as a yardstick for what csrc/ does.
//
//   c++ -O3 -march=native -std=c++17 benchmarks/floor.cpp -o floor && ./floor RANKS BYTES [REPETITIONS]
//
// The ranks are forked processes and their float32 buffers lie in memory that all of them map, so nothing is staged or
// copied: rank r adds up the r-th slice of all buffers, piece by piece, and writes the sums to all of them. That reads
// and writes every buffer once; only the two meetings, before and after, come on top. Prints the median over the
// repetitions of the time that the slowest rank takes, in microseconds.

#include <sched.h>
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
#include <new>
#include <vector>

namespace {

constexpr int kMaxRanks = 64;
constexpr size_t kPiece = 1024;  // floats of a sum that stays in the first-level cache until it is written

struct alignas(64) Turn {
  std::atomic<uint32_t> number{0};
};

struct Shared {
  Turn turns[kMaxRanks];
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

void* map_shared(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  return memory;
}

// Acquire and release: what a rank wrote before it came is seen by whoever saw it come.
void meet(const Job& job, int rank, uint32_t turn) {
  job.shared->turns[rank].number.store(turn, std::memory_order_release);
  for (int other = 0; other < job.ranks; ++other) {
    while (job.shared->turns[other].number.load(std::memory_order_acquire) < turn) sched_yield();
  }
}

void all_reduce_slice(const Job& job, int rank) {
  const size_t first = job.count * rank / job.ranks;
  const size_t last = job.count * (rank + 1) / job.ranks;
  float sum[kPiece];
  for (size_t start = first; start < last; start += kPiece) {
    const size_t size = std::min(kPiece, last - start);
    std::memcpy(sum, job.buffer(0) + start, size * sizeof(float));
    for (int other = 1; other < job.ranks; ++other) {
      const float* values = job.buffer(other) + start;
      for (size_t i = 0; i < size; ++i) sum[i] += values[i];
    }
    for (int other = 0; other < job.ranks; ++other) {
      std::memcpy(job.buffer(other) + start, sum, size * sizeof(float));
    }
  }
}

std::vector<double> run_rank(const Job& job, int rank) {
  std::fill_n(job.buffer(rank), job.count, rank == 0 ? 1.0f : 0.0f);
  std::vector<double> slowest;
  uint32_t turn = 0;
  for (int repetition = 0; repetition < job.repetitions; ++repetition) {
    meet(job, rank, ++turn);
    const auto start = std::chrono::steady_clock::now();
    meet(job, rank, ++turn);
    all_reduce_slice(job, rank);
    meet(job, rank, ++turn);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    job.shared->seconds[rank] = taken.count();
    meet(job, rank, ++turn);
    slowest.push_back(*std::max_element(job.shared->seconds, job.shared->seconds + job.ranks));
    // Back to a sum of one, so that the numbers stay finite.
    if (rank != 0) std::fill_n(job.buffer(rank), job.count, 0.0f);
  }
  return slowest;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s RANKS BYTES [REPETITIONS]\n", argv[0]);
    return 2;
  }
  Job job{};
  job.ranks = std::clamp(std::atoi(argv[1]), 1, kMaxRanks);
  job.count = std::max<size_t>(std::strtoull(argv[2], nullptr, 10) / sizeof(float), 1);
  job.repetitions = argc > 3 ? std::max(std::atoi(argv[3]), 1) : 50;
  job.shared = new (map_shared(sizeof(Shared))) Shared;
  job.buffers = static_cast<float*>(map_shared(job.ranks * job.count * sizeof(float)));
  for (int rank = 1; rank < job.ranks; ++rank) {
    if (fork() == 0) {
      run_rank(job, rank);
      _exit(0);
    }
  }
  std::vector<double> times = run_rank(job, 0);
  while (wait(nullptr) > 0) {
  }
  if (job.buffer(0)[job.count - 1] != 1.0f) {
    std::fprintf(stderr, "wrong sum\n");
    return 1;
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  std::printf("%.2f\n", times[times.size() / 2] * 1e6);
  return 0;
}
