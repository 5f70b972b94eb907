#pragma once

#include <vector>

#include "common/dtype.h"
#include "cuda/flat_body.h"
#include "cuda/flat_table.h"
#include "device/device.h"

namespace ours::cuda {

/// Elements that move from one place to another.
struct Move {
  const char* from;
  char* to;
  size_t count;
};

/// The moves of flatten() or unflatten(); pieces without elements are left out.
std::vector<Move> moves_into(void* flat, DType flat_type, const std::vector<FlatPiece>& pieces);
std::vector<Move> moves_out_of(const void* flat, DType flat_type, const std::vector<FlatPiece>& pieces);

/// The largest unit, up to 8 bytes, of which all the addresses and elements of `bytes` bytes are multiples.
size_t copy_unit(const std::vector<Move>& moves, size_t bytes);

/// A kernel's parameters and how many blocks of kThreads threads it takes.
struct FlatLaunch {
  FlatTask task;
  unsigned blocks;
};

/// Makes as many launches as the moves need. Throws InvalidArgument if an address is no multiple of its element size.
std::vector<FlatLaunch> plan_launches(const std::vector<Move>& moves, double scale, const FlatShape& shape);

/// The kernel for the moves, found by Find, and its launches.
template <class Find>
struct FlatPlan {
  typename Find::Kernel kernel;
  std::vector<FlatLaunch> launches;

  FlatPlan(std::vector<Move> moves, DType from, DType to, double scale) {
    if (from == to && scale == 1.0) {
      const size_t bytes = size_of(from), unit = copy_unit(moves, bytes);
      for (Move& move : moves) move.count *= bytes / unit;
      kernel = Find::copy(unit);
    } else {
      kernel = Find::conversion(from, to);
    }
    launches = plan_launches(moves, scale, kernel.shape);
  }
};

}  // namespace ours::cuda
