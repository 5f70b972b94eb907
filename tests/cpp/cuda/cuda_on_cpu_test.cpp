#include "support/cuda_on_cpu.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "common/error.h"
#include "support/reduce_reference.h"
#include "support/stand_in_flat.h"
#include "support/testing.h"

// The kernels of csrc/cuda, thread by thread on the CPU, against the CPU's own loops.

namespace ours {
namespace {

using cuda::kThreads;
using testing::move_on_cpu;
using testing::reduce_on_cpu;

constexpr ReduceKind kKinds[] = {ReduceKind::Sum,   ReduceKind::Avg,    ReduceKind::Product,
                                 ReduceKind::Min,   ReduceKind::Max,    ReduceKind::BitAnd,
                                 ReduceKind::BitOr, ReduceKind::BitXor, ReduceKind::PremulSum};
constexpr size_t kGuard = 64;

/// Bytes at a chosen distance from a multiple of 64, between guards.
class Buffer {
 public:
  Buffer(size_t bytes, size_t distance) : bytes_(bytes), memory_(bytes + 64 + 2 * kGuard + distance, '\x5a') {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    at_ = kGuard + (64 - (address + kGuard) % 64) % 64 + distance;
  }
  char* data() { return memory_.data() + at_; }
  void fill(std::mt19937& random) {
    std::generate(data(), data() + bytes_, [&] { return static_cast<char>(random()); });
  }
  bool guards_intact() const {
    const auto intact = [](char c) { return c == '\x5a'; };
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(at_);
    return std::all_of(memory_.begin(), begin, intact) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), memory_.end(), intact);
  }

 private:
  size_t bytes_, at_ = 0;
  std::vector<char> memory_;
};

struct Case {
  DType dtype;
  Reduction reduction;
  size_t count, sources, distance;
  bool alike;  ///< whether all buffers lie at the same distance from a multiple of 16 bytes
};

void check_reduce(std::mt19937& random, const Case& c) {
  const size_t size = size_of(c.dtype), bytes = c.count * size;
  std::vector<Buffer> buffers;
  for (size_t s = 0; s <= c.sources; ++s) {
    buffers.emplace_back(bytes, (c.alike ? c.distance : c.distance + s) * size % 64);
    if (s < c.sources) buffers.back().fill(random);
  }
  std::vector<const void*> sources;
  std::vector<const char*> host;
  for (size_t s = 0; s < c.sources; ++s) {
    sources.push_back(buffers[s].data());
    host.push_back(buffers[s].data());
  }
  std::vector<char> expected(bytes + 1);
  testing::reference_reduce(expected.data(), host, c.count, c.dtype, c.reduction);
  // One result has memory of its own, and one that of a source.
  const std::vector<void*> results = {buffers.back().data(), buffers[c.sources / 2].data()};
  reduce_on_cpu(results, sources, c.count, c.dtype, c.reduction);
  bool right = true;
  for (void* result : results) {
    right = right && testing::same_values(static_cast<char*>(result), expected.data(), bytes, c.dtype);
  }
  for (const Buffer& buffer : buffers) right = right && buffer.guards_intact();
  if (right) return;
  testing::fail(__FILE__, __LINE__,
                std::string(name_of(c.dtype)) + " " + name_of(c.reduction.kind) + ", " + std::to_string(c.sources) +
                    " sources, " + std::to_string(c.count) + " elements, distance " + std::to_string(c.distance));
}

TEST(cuda_reduce_equals_the_reference_for_every_dtype_and_op) {
  std::mt19937 random(1);
  for (int d = 0; d <= static_cast<int>(DType::Opaque8); ++d) {
    for (ReduceKind kind : kKinds) {
      const auto dtype = static_cast<DType>(d);
      if (!is_supported(kind, dtype)) continue;
      for (size_t count : {0, 1, 15, 16, 17, 1023, 4096, 5000}) {
        check_reduce(random, {dtype, {kind, 3, 0.3}, count, 3, 0, true});
        check_reduce(random, {dtype, {kind, 4, 0.3}, count, 4, 3, true});
        check_reduce(random, {dtype, {kind, 2, -1.5}, count, 2, 1, false});
      }
    }
  }
}

TEST(cuda_reduce_of_several_blocks) {
  std::mt19937 random(2);
  for (DType dtype : {DType::Bool, DType::Int8, DType::BFloat16, DType::Float32, DType::Complex128}) {
    const ReduceKind kind = ReduceKind::Product;
    for (size_t count : {20000, 32768, 33001}) {
      check_reduce(random, {dtype, {kind, 2, 1.0}, count, 2, 0, true});
      check_reduce(random, {dtype, {kind, 2, 1.0}, count, 2, 1, false});
    }
  }
}

TEST(cuda_every_half_survives_and_sums_round_once) {
  std::vector<uint16_t> all(65536), out(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (DType dtype : {DType::Float16, DType::BFloat16}) {
    reduce_on_cpu({out.data()}, {all.data()}, all.size(), dtype, {ReduceKind::Sum, 1, 1.0});
    CHECK(
        testing::same_values(reinterpret_cast<char*>(out.data()), reinterpret_cast<char*>(all.data()), 131072, dtype));
  }
}

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

/// Moves one array into another by pieces of odd sizes, in both directions at once.
void check_moves(std::mt19937& random, DType from, DType to, double scale, size_t pieces, size_t most) {
  const size_t in = size_of(from), out = size_of(to);
  std::vector<size_t> counts, from_at, to_at;
  size_t from_end = 0, to_end = 0;
  for (size_t i = 0; i < pieces; ++i) {
    counts.push_back(i % 7 == 3 ? 0 : 1 + random() % most);
    from_at.push_back(from_end);
    to_at.push_back(to_end);
    from_end += counts.back() + random() % 3;
    to_end += counts.back() + random() % 2;
  }
  Buffer source(from_end * in, random() % 4 * in), target(to_end * out, random() % 4 * out);
  source.fill(random);
  std::vector<char> expected(target.data(), target.data() + to_end * out);
  std::vector<FlatPiece> flat_pieces;
  for (size_t i = 0; i < pieces; ++i) {
    testing::convert_scaled(expected.data() + to_at[i] * out, to, source.data() + from_at[i] * in, from, counts[i],
                            scale);
    flat_pieces.push_back({source.data() + from_at[i] * in, to_at[i], counts[i]});
  }
  const size_t launches = move_on_cpu(cuda::moves_into(target.data(), to, flat_pieces), from, to, scale);
  CHECK(launches <= pieces / cuda::kMostPieces + 1);
  if (!testing::same_values(target.data(), expected.data(), expected.size(), to) || !target.guards_intact()) {
    testing::fail(__FILE__, __LINE__, std::string(name_of(from)) + " to " + name_of(to));
  }
  // Back from the flat array, into cleared pieces.
  std::vector<char> back(source.data(), source.data() + from_end * in);
  for (size_t i = 0; i < pieces; ++i) {
    testing::convert_scaled(back.data() + from_at[i] * in, from, target.data() + to_at[i] * out, to, counts[i], scale);
    std::memset(source.data() + from_at[i] * in, 0, counts[i] * in);
  }
  move_on_cpu(cuda::moves_out_of(target.data(), to, flat_pieces), to, from, scale);
  CHECK(testing::same_values(source.data(), back.data(), back.size(), from));
}

TEST(cuda_flatten_equals_the_reference_for_all_floats) {
  std::mt19937 random(3);
  const DType floats[] = {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64};
  for (DType from : floats) {
    for (DType to : floats) {
      for (double scale : {1.0, 0.3}) {
        check_moves(random, from, to, scale, 20, 300);
        check_moves(random, from, to, scale, 1, 40000);
      }
    }
  }
}

TEST(cuda_flatten_copies_every_width) {
  std::mt19937 random(4);
  for (int d = 0; d <= static_cast<int>(DType::Opaque8); ++d) {
    const auto dtype = static_cast<DType>(d);
    check_moves(random, dtype, dtype, 1.0, 20, 300);
    check_moves(random, dtype, dtype, 1.0, 2, 40000);
  }
}

TEST(cuda_flatten_of_more_pieces_than_a_launch_takes) {
  std::mt19937 random(5);
  check_moves(random, DType::BFloat16, DType::Float32, 1.0, 1000, 5);
  CHECK_EQ(move_on_cpu({}, DType::Float32, DType::Float32, 1.0), 0u);
}

TEST(cuda_flatten_copies_addresses_that_do_not_fit_in_smaller_units) {
  std::vector<char> memory(64);
  const auto moves = [&](size_t from, size_t to) {
    return std::vector<cuda::Move>{{memory.data() + from, memory.data() + to, 1}};
  };
  const size_t base = 16 - reinterpret_cast<uintptr_t>(memory.data()) % 16;
  CHECK_EQ(cuda::copy_unit(moves(base, base + 16), 16), 8u);
  CHECK_EQ(cuda::copy_unit(moves(base, base + 16), 4), 4u);
  CHECK_EQ(cuda::copy_unit(moves(base + 2, base + 16), 8), 2u);
  CHECK_EQ(cuda::copy_unit(moves(base, base + 17), 8), 1u);
  const auto crooked = [&] { move_on_cpu(moves(base + 2, base + 16), DType::Float32, DType::Float16, 1.0); };
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, crooked()), "copy the tensor first");
}

}  // namespace
}  // namespace ours
