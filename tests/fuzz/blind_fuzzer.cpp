#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>

#include "fuzz/mutate.h"

// Stands in for libFuzzer where the compiler lacks it: mutates the seeds without looking at which code they reach.
//   fuzz [-runs=N] [-max_total_time=SECONDS] [FILE or FOLDER of seeds]...
// Other options of libFuzzer are ignored.
// An input that ends the program is left in the file crash-input.

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace {

using ours::fuzz::Bytes;

Bytes current;

void run(const Bytes& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

void keep_current() { std::ofstream("crash-input", std::ios::binary) << current; }

}  // namespace

// Called by sanitizers before they end the program.
extern "C" void __asan_on_error() { keep_current(); }

int main(int argc, char** argv) {
  LLVMFuzzerInitialize(&argc, &argv);
  using Clock = std::chrono::steady_clock;
  unsigned long runs = 0;
  auto end = Clock::time_point::max();
  ours::fuzz::Random random(1);
  std::vector<Bytes> seeds;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "-runs=", 6) == 0) {
      runs = std::strtoul(argv[i] + 6, nullptr, 10);
    } else if (std::strncmp(argv[i], "-max_total_time=", 16) == 0) {
      const long seconds = std::strtol(argv[i] + 16, nullptr, 10);
      if (seconds > 0) end = Clock::now() + std::chrono::seconds(seconds);
    } else if (argv[i][0] != '-') {
      for (const auto& seed : ours::fuzz::read_seeds(argv[i])) seeds.push_back(seed.bytes);
    }
  }
  if (seeds.empty()) seeds.emplace_back();
  unsigned long done = 0;
  try {
    for (const Bytes& seed : seeds) run(seed);
    for (; done < runs && Clock::now() < end; ++done) run(ours::fuzz::mutate(seeds, random));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "ERROR: %s\n", e.what());
    keep_current();
    return 1;
  }
  std::fprintf(stderr, "Done %lu runs\n", done + seeds.size());
  return 0;
}
