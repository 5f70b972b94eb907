#include "cuda/reduce_launch.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/error.h"
#include "common/partition.h"

namespace ours::cuda {
namespace {

/// The number of elements before the first vector; all of them if the buffers differ in alignment.
size_t head_of(const std::vector<uintptr_t>& all, size_t count, const ReduceShape& shape) {
  const auto differs = [&](uintptr_t address) { return (address ^ all.front()) % kVectorBytes != 0; };
  if (std::any_of(all.begin(), all.end(), differs)) return count;
  const size_t bytes = (kVectorBytes - all.front() % kVectorBytes) % kVectorBytes;
  return bytes % shape.element_bytes == 0 ? std::min(count, bytes / shape.element_bytes) : count;
}

}  // namespace

ReduceLaunch plan_launch(const std::vector<void*>& results, const std::vector<const void*>& sources,
                         const kernels::ReducePlan& plan, const ReduceShape& shape) {
  std::vector<uintptr_t> all;
  for (const void* source : sources) all.push_back(reinterpret_cast<uintptr_t>(source));
  for (const void* result : results) all.push_back(reinterpret_cast<uintptr_t>(result));
  for (const uintptr_t address : all) {
    if (plan.count != 0 && address % shape.alignment != 0) {
      throw InvalidArgument("a buffer in device memory does not begin at a multiple of " +
                            std::to_string(shape.alignment) + " bytes, as its elements need; copy the tensor first");
    }
  }
  ReduceLaunch launch{};
  ReduceTask& task = launch.task;
  std::transform(sources.begin(), sources.end(), task.sources,
                 [](const void* p) { return static_cast<const char*>(p); });
  std::transform(results.begin(), results.end(), task.results, [](void* p) { return static_cast<char*>(p); });
  task.source_count = static_cast<int>(sources.size());
  task.result_count = static_cast<int>(results.size());
  task.value = plan.value;
  task.head = head_of(all, plan.count, shape);
  task.vectors = (plan.count - task.head) * shape.element_bytes / kVectorBytes;
  task.scalars = plan.count - task.vectors * kVectorBytes / shape.element_bytes;
  // There are as many blocks as the work needs, not as many as fit at once: the hardware starts them as others end, so
  // a device that is busy with other work is shared well, and nothing depends on the device's size.
  launch.blocks = std::max(piece_count(task.vectors, kThreads * shape.unroll),
                           piece_count(task.scalars, kThreads * kScalarsPerThread));
  return launch;
}

}  // namespace ours::cuda
