#include "common/error.h"
#include "support/cuda_on_cpu.h"
#include "support/testing.h"

// How the work of a call is divided among the threads of kernels.

namespace ours {
namespace {

using testing::reduce_on_cpu;

TEST(cuda_launch_has_vectors_wherever_it_can) {
  std::vector<float> memory(1 << 16);
  float* base = memory.data();
  while (reinterpret_cast<uintptr_t>(base) % 16 != 0) ++base;
  const auto launch = [&](size_t to, size_t from, size_t count) {
    return reduce_on_cpu({base + 30000 + to}, {base + from}, count, DType::Float32, {});
  };
  auto l = launch(0, 0, 4096 + 5);
  CHECK_EQ(l.task.head, 0u);
  CHECK_EQ(l.task.vectors, 1025u);
  CHECK_EQ(l.task.scalars, 1u);
  CHECK_EQ(l.blocks, 2u);
  l = launch(1, 5, 4096);
  CHECK_EQ(l.task.head, 3u);
  CHECK_EQ(l.task.vectors, 1023u);
  CHECK_EQ(l.task.scalars, 4u);
  CHECK_EQ(l.blocks, 1u);
  l = launch(0, 1, 4096);
  CHECK_EQ(l.task.vectors, 0u);
  CHECK_EQ(l.task.scalars, 4096u);
  CHECK_EQ(l.blocks, 4u);
  CHECK_EQ(launch(1, 1, 2).task.scalars, 2u);
  CHECK_EQ(launch(0, 0, 0).blocks, 0u);
  const auto crooked = [&] { reduce_on_cpu({base}, {reinterpret_cast<char*>(base) + 2}, 4, DType::Float32, {}); };
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, crooked()), "multiple of 4 bytes");
}

}  // namespace
}  // namespace ours
