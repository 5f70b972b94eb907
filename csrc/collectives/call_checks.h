#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// What every Group checks of its arguments before it communicates.

namespace ours {

/// Throws InvalidArgument unless 0 <= root < size.
void check_root(int root, int size);

/// Throws InvalidArgument unless a reduce_scatter among `size` ranks has an input and a count for each.
void check_reduce_scatter(const std::vector<const void*>& inputs, const std::vector<size_t>& counts, int size);

/// Stands for a list of sizes where ranks compare what they called: lists of the same sum have different ones.
uint64_t fingerprint_of(const std::vector<size_t>& counts);

}  // namespace ours
