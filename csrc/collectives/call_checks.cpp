#include "collectives/call_checks.h"

#include <string>

#include "common/error.h"

namespace ours {

void check_root(int root, int size) {
  if (root >= 0 && root < size) return;
  throw InvalidArgument("root is " + std::to_string(root) + " in a group of " + std::to_string(size) +
                        " ranks; give a rank of the group, 0 to " + std::to_string(size - 1));
}

void check_reduce_scatter(const std::vector<const void*>& inputs, const std::vector<size_t>& counts, int size) {
  const auto ranks = static_cast<size_t>(size);
  if (inputs.size() == ranks && counts.size() == ranks) return;
  throw InvalidArgument("reduce_scatter got " + std::to_string(inputs.size()) + " inputs and " +
                        std::to_string(counts.size()) + " counts in a group of " + std::to_string(ranks) +
                        " ranks; give one of each a rank");
}

uint64_t fingerprint_of(const std::vector<size_t>& counts) {
  uint64_t fingerprint = 0;
  for (const size_t count : counts) fingerprint = fingerprint * 0x9E3779B97F4A7C15u + count;
  return fingerprint;
}

}  // namespace ours
