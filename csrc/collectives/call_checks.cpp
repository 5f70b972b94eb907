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

void check_one_a_rank(const Call& call, size_t buffers, size_t ranks) {
  if (buffers == ranks) return;
  throw InvalidArgument(std::string(name_of(call.op)) + " got " + std::to_string(buffers) + " buffers in a group of " +
                        std::to_string(ranks) + " ranks; give one a rank");
}

void check_own(const Call& call, int rank, size_t gives, size_t expects) {
  if (gives == expects) return;
  throw InvalidArgument(std::string(name_of(call.op)) + " on rank " + std::to_string(rank) + " gives itself " +
                        std::to_string(gives) + " bytes but expects " + std::to_string(expects) +
                        "; make the sizes equal");
}

uint64_t fingerprint_of(const std::vector<size_t>& counts) {
  uint64_t fingerprint = 0;
  for (const size_t count : counts) fingerprint = fingerprint * 0x9E3779B97F4A7C15u + count;
  return fingerprint;
}

}  // namespace ours
