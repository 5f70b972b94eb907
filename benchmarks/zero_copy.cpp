// The lower bound for benchmarks/collectives.py: zero_copy.h as a library for ctypes, which zero_copy.py compiles.

#include "zero_copy.h"

/// All ranks map `memory`: a cache line for each rank, initially zero, and then the ranks' buffers of `count` floats
/// each.
extern "C" void zero_copy_all_reduce(void* memory, int ranks, int rank, size_t count) {
  auto* const turns = static_cast<zero_copy::Turn*>(memory);
  zero_copy::all_reduce({ranks, rank, count, turns, reinterpret_cast<float*>(turns + ranks)});
}
