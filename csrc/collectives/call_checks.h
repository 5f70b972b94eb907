#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/group.h"

// What every Group checks of its arguments before it communicates.

namespace ours {

/// Throws InvalidArgument unless 0 <= root < size.
void check_root(int root, int size);

/// Throws InvalidArgument unless a reduce_scatter among `size` ranks has an input and a count for each.
void check_reduce_scatter(const std::vector<const void*>& inputs, const std::vector<size_t>& counts, int size);

/// Throws InvalidArgument unless there are `ranks` buffers.
void check_one_a_rank(const Call& call, size_t buffers, size_t ranks);

/// Throws InvalidArgument unless what a rank gives itself has the size that it expects of itself, in bytes.
void check_own(const Call& call, int rank, size_t gives, size_t expects);

/// Stands for a list of sizes where ranks compare what they called: lists of the same sum have different ones.
uint64_t fingerprint_of(const std::vector<size_t>& counts);

}  // namespace ours
