#include "cuda/flat_table.h"
#include "cuda/reduce_table.h"
#include "kernels/plan.h"
#include "support/cuda_on_cpu.h"

namespace ours::testing {
namespace {

template <class Launch, class Shape>
struct Kernel {
  void (*run)(const Launch&) = nullptr;
  Shape shape;
};

template <class Thread, class Launch>
void run_all(const Launch& launch) {
  for (size_t block = 0; block < launch.blocks; ++block) {
    for (unsigned thread = 0; thread < cuda::kThreads; ++thread) Thread::run(launch.task, block, thread);
  }
}

struct MakeReduce {
  using Made = Kernel<cuda::ReduceLaunch, cuda::ReduceShape>;
  template <class Spec>
  static Made make() {
    return {&run_all<cuda::ReduceThread<Spec>, cuda::ReduceLaunch>, cuda::shape_of<Spec>()};
  }
};

struct MakeFlat {
  using Made = Kernel<cuda::FlatLaunch, cuda::FlatShape>;
  template <class Spec>
  static Made make() {
    return {&run_all<cuda::FlatThread<Spec>, cuda::FlatLaunch>, cuda::flat_shape_of<Spec>()};
  }
};

}  // namespace

cuda::ReduceLaunch reduce_on_cpu(const std::vector<void*>& results, const std::vector<const void*>& sources,
                                 size_t count, DType dtype, const Reduction& reduction) {
  using Table = cuda::ReduceTable<MakeReduce>;
  const kernels::ReducePlan plan = kernels::plan_reduction(dtype, count, reduction);
  const auto kernel = Table::find(plan.element, plan.combine);
  const cuda::ReduceLaunch launch = cuda::plan_launch(results, sources, plan, kernel.shape);
  kernel.run(launch);
  return launch;
}

size_t move_on_cpu(const std::vector<cuda::Move>& moves, DType from, DType to, double scale) {
  const auto kernel = cuda::FlatTable<MakeFlat>::find(from, to);
  const std::vector<cuda::FlatLaunch> launches = cuda::plan_launches(moves, scale, kernel.shape);
  for (const cuda::FlatLaunch& launch : launches) kernel.run(launch);
  return launches.size();
}

}  // namespace ours::testing
