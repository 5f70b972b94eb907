#include "cuda/reduce_table.h"
#include "kernels/plan.h"
#include "support/cuda_on_cpu.h"

namespace ours::testing {
namespace {

struct Kernel {
  void (*run)(const cuda::ReduceLaunch&) = nullptr;
  cuda::ReduceShape shape;
};

template <class Thread>
void run_all(const cuda::ReduceLaunch& launch) {
  for (size_t block = 0; block < launch.blocks; ++block) {
    for (unsigned thread = 0; thread < cuda::kThreads; ++thread) Thread::run(launch.task, block, thread);
  }
}

struct MakeKernel {
  using Made = Kernel;
  template <class Spec>
  static Made make() {
    return {&run_all<cuda::ReduceThread<Spec>>, cuda::shape_of<Spec>()};
  }
};

}  // namespace

cuda::ReduceLaunch reduce_on_cpu(const std::vector<void*>& results, const std::vector<const void*>& sources,
                                 size_t count, DType dtype, const Reduction& reduction) {
  using Table = cuda::ReduceTable<MakeKernel>;
  const kernels::ReducePlan plan = kernels::plan_reduction(dtype, count, reduction);
  const auto kernel = Table::find(plan.element, plan.combine);
  const cuda::ReduceLaunch launch = cuda::plan_launch(results, sources, plan, kernel.shape);
  kernel.run(launch);
  return launch;
}

}  // namespace ours::testing
