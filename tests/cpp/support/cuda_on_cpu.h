#pragma once

#include <vector>

#include "cuda/flat_launch.h"
#include "cuda/flat_table.h"
#include "cuda/reduce_launch.h"
#include "cuda/reduce_table.h"
#include "kernels/plan.h"

// The kernels of csrc/cuda on the CPU: each thread runs the same code, one thread after the other.

namespace ours::testing {

struct ReduceOnCpu {
  using Run = void (*)(const cuda::ReduceLaunch&);
  struct Kernel {
    Run run = nullptr;
    cuda::ReduceShape shape;
  };
  struct Make {
    using Made = Kernel;
    template <class Spec>
    static Made make() {
      return {[](const cuda::ReduceLaunch& launch) {
                for (size_t block = 0; block < launch.blocks; ++block) {
                  for (unsigned thread = 0; thread < cuda::kThreads; ++thread) {
                    cuda::ReduceThread<Spec>::run(launch.task, block, thread);
                  }
                }
              },
              cuda::shape_of<Spec>()};
    }
  };

  static Kernel find(const kernels::ReducePlan& plan) {
    const Kernel found = cuda::ReduceTable<Make>::find_integer(plan.element, plan.combine);
    return found.run != nullptr ? found : cuda::ReduceTable<Make>::find_floating(plan.element, plan.combine);
  }
};

inline cuda::ReduceLaunch reduce_on_cpu(const std::vector<void*>& results, const std::vector<const void*>& sources,
                                        size_t count, DType dtype, const Reduction& reduction) {
  const kernels::ReducePlan plan = kernels::plan_reduction(dtype, count, reduction);
  const ReduceOnCpu::Kernel kernel = ReduceOnCpu::find(plan);
  const cuda::ReduceLaunch launch = cuda::plan_launch(results, sources, plan, kernel.shape);
  kernel.run(launch);
  return launch;
}

struct FlatOnCpu {
  struct Kernel {
    void (*run)(const cuda::FlatLaunch&) = nullptr;
    cuda::FlatShape shape;
  };
  struct Make {
    using Made = Kernel;
    template <class Spec>
    static Made make() {
      return {[](const cuda::FlatLaunch& launch) {
                for (unsigned block = 0; block < launch.blocks; ++block) {
                  for (unsigned thread = 0; thread < cuda::kThreads; ++thread) {
                    cuda::FlatThread<Spec>::run(launch.task, block, thread);
                  }
                }
              },
              cuda::flat_shape_of<Spec>()};
    }
  };
  static Kernel copy(size_t unit) { return cuda::FlatTable<Make>::find_copy(unit); }
  static Kernel conversion(DType from, DType to) { return cuda::FlatTable<Make>::find_conversion(from, to); }
};

/// Returns the number of launches.
inline size_t move_on_cpu(const std::vector<cuda::Move>& moves, DType from, DType to, double scale) {
  const cuda::FlatPlan<FlatOnCpu> plan(moves, from, to, scale);
  for (const cuda::FlatLaunch& launch : plan.launches) plan.kernel.run(launch);
  return plan.launches.size();
}

}  // namespace ours::testing
