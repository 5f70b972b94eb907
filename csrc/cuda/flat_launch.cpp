#include "cuda/flat_launch.h"

#include <cstdint>
#include <string>

#include "common/error.h"
#include "common/partition.h"

namespace ours::cuda {
namespace {

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Half of what a launch may have.
constexpr size_t kMostBlocks = size_t{1} << 30;

void check_alignment(const Move& move, const FlatShape& shape) {
  if (address_of(move.from) % shape.in_bytes == 0 && address_of(move.to) % shape.out_bytes == 0) return;
  throw InvalidArgument(
      "a piece of a flat array in device memory does not begin at a multiple of its elements' size (" +
      std::to_string(shape.in_bytes) + " and " + std::to_string(shape.out_bytes) + " bytes); copy the tensor first");
}

}  // namespace

std::vector<Move> moves_into(void* flat, DType flat_type, const std::vector<FlatPiece>& pieces) {
  std::vector<Move> moves;
  for (const Move& back : moves_out_of(flat, flat_type, pieces)) {
    moves.push_back({back.to, const_cast<char*>(back.from), back.count});
  }
  return moves;
}

std::vector<Move> moves_out_of(const void* flat, DType flat_type, const std::vector<FlatPiece>& pieces) {
  std::vector<Move> moves;
  for (const FlatPiece& p : pieces) {
    const char* place = static_cast<const char*>(flat) + p.offset * size_of(flat_type);
    if (p.count != 0) moves.push_back({place, static_cast<char*>(p.data), p.count});
  }
  return moves;
}

std::vector<FlatLaunch> plan_launches(const std::vector<Move>& moves, double scale, const FlatShape& shape) {
  std::vector<FlatLaunch> launches;
  for (const Move& move : moves) {
    check_alignment(move, shape);
    const size_t blocks = piece_count(move.count, shape.tile);
    if (launches.empty() || launches.back().task.pieces == kMostPieces ||
        launches.back().blocks + blocks > kMostBlocks) {
      launches.emplace_back();
      launches.back().task.scale = scale;
    }
    FlatLaunch& last = launches.back();
    const int p = last.task.pieces++;
    last.task.from[p] = move.from;
    last.task.to[p] = move.to;
    last.task.count[p] = move.count;
    last.task.first_block[p] = last.blocks;
    last.blocks += static_cast<unsigned>(blocks);
  }
  return launches;
}

}  // namespace ours::cuda
