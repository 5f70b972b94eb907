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

/// A kernel's parameters and how many blocks of kThreads threads it takes.
struct FlatLaunch {
  FlatTask task;
  unsigned blocks;
};

/// Makes as many launches as the moves need. Throws InvalidArgument if an address is no multiple of its element size.
std::vector<FlatLaunch> plan_launches(const std::vector<Move>& moves, double scale, const FlatShape& shape);

}  // namespace ours::cuda
