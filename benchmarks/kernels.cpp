#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/reduce.h"
#include "kernels/variant.h"

// The speed of the kernels on cached data: bytes read and written per second, compared with memcpy and a naive loop.
// Usage: bench [part of a row's name]

namespace {

using ours::DType;
using ours::ReduceKind;
using ours::kernels::Variant;

constexpr size_t kMaxSources = 8;

struct Buffers {
  explicit Buffers(size_t bytes) : bytes(bytes), memory((kMaxSources + 1) * (bytes + 4096) + 64) {
    // The value is about 1 in every type: no subnormals, no overflow. Staggered, like different ranks' tensors.
    char* base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    std::fill(memory.begin(), memory.end(), '\x3c');
    for (size_t s = 0; s < kMaxSources; ++s) srcs[s] = base + s * (bytes + 4096) + s * 256;
    dst = base + kMaxSources * (bytes + 4096);
  }
  size_t bytes;
  std::vector<char> memory;
  const void* srcs[kMaxSources];
  char* dst;
};

/// Seconds for each call, the best of several batches, so that other load counts little.
double seconds(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  call();
  size_t repeats = 1;
  double best = 1e9;
  for (int batch = 0; batch < 12; ++batch) {
    const auto start = Clock::now();
    for (size_t i = 0; i < repeats; ++i) call();
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::min(best, took / static_cast<double>(repeats));
    if (took < 2e-3) repeats *= 2, --batch;
  }
  return best;
}

// Not inlined and not unrolled by hand, to show what a plain loop over floats costs.
__attribute__((noinline)) void naive_sum(float* dst, const float* const* srcs, int sources, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float sum = srcs[0][i];
    for (int s = 1; s < sources; ++s) sum += srcs[s][i];
    dst[i] = sum;
  }
}

struct Row {
  const char* name;
  DType dtype;
  ReduceKind kind;
  int sources;
  int ranks;
};

}  // namespace

int main(int argc, char** argv) {
  const Row rows[] = {
      {"float32 SUM", DType::Float32, ReduceKind::Sum, 2, 2},
      {"float32 SUM", DType::Float32, ReduceKind::Sum, 3, 3},
      {"float32 SUM", DType::Float32, ReduceKind::Sum, 4, 4},
      {"float32 SUM", DType::Float32, ReduceKind::Sum, 8, 8},
      {"float32 AVG/4", DType::Float32, ReduceKind::Avg, 4, 4},
      {"float32 AVG/3", DType::Float32, ReduceKind::Avg, 3, 3},
      {"float32 MAX", DType::Float32, ReduceKind::Max, 4, 4},
      {"float64 SUM", DType::Float64, ReduceKind::Sum, 4, 4},
      {"bfloat16 SUM", DType::BFloat16, ReduceKind::Sum, 4, 4},
      {"bfloat16 AVG", DType::BFloat16, ReduceKind::Avg, 4, 4},
      {"float16 SUM", DType::Float16, ReduceKind::Sum, 4, 4},
      {"int8 SUM", DType::Int8, ReduceKind::Sum, 4, 4},
      {"int8 MAX", DType::Int8, ReduceKind::Max, 4, 4},
      {"int64 SUM", DType::Int64, ReduceKind::Sum, 4, 4},
      {"int64 MIN", DType::Int64, ReduceKind::Min, 4, 4},
      {"int64 AVG", DType::Int64, ReduceKind::Avg, 4, 4},
      {"complex64 PROD", DType::Complex64, ReduceKind::Product, 2, 2},
  };
  const std::string wanted = argc > 1 ? argv[1] : "";

  for (size_t bytes : {size_t{4096}, size_t{65536}, size_t{262144}, size_t{8} << 20}) {
    Buffers b(bytes);
    const auto report = [&](const std::string& name, int streams, const std::function<void()>& call) {
      if (name.find(wanted) == std::string::npos) return;
      const double s = seconds(call);
      std::printf("%8zu B  %-34s %9.2f us %8.1f GB/s\n", bytes, name.c_str(), s * 1e6,
                  static_cast<double>(bytes) * streams / s / 1e9);
      std::fflush(stdout);
    };
    report("memcpy", 2, [&] { std::memcpy(b.dst, b.srcs[0], bytes); });
    report("copy_stream", 2, [&] { ours::copy_bytes(b.dst, b.srcs[0], bytes, true); });
    report("naive float32 SUM x4", 5, [&] {
      naive_sum(reinterpret_cast<float*>(b.dst), reinterpret_cast<const float* const*>(b.srcs), 4, bytes / 4);
    });
    for (const Row& row : rows) {
      const size_t count = bytes / ours::size_of(row.dtype);
      for (const Variant* variant : ours::kernels::variants()) {
        for (bool stream : {false, true}) {
          const std::string name = std::string(row.name) + " x" + std::to_string(row.sources) + " " + variant->name +
                                   (stream ? " stream" : "");
          report(name, row.sources + 1, [&] {
            ours::kernels::reduce_by(*variant, b.dst, b.srcs, row.sources, count, row.dtype, {row.kind, row.ranks, 1.0},
                                     stream);
          });
        }
      }
    }
  }
  return 0;
}
