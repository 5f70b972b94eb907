#include "collectives/op.h"

#include <cstddef>
#include <iterator>

namespace ours {

namespace {

// In the order of Op.
constexpr const char* kNames[] = {"barrier",
                                  "all_reduce",
                                  "all_reduce_coalesced",
                                  "all_reduce (sparse)",
                                  "reduce",
                                  "reduce_scatter",
                                  "reduce_scatter_tensor",
                                  "reduce_scatter_tensor_coalesced",
                                  "broadcast",
                                  "all_gather",
                                  "all_gather_into_tensor",
                                  "all_gather_into_tensor_coalesced",
                                  "gather",
                                  "gather_single",
                                  "scatter",
                                  "all_to_all",
                                  "all_to_all_single",
                                  "monitored_barrier",
                                  "send",
                                  "recv",
                                  "recv (from any source)",
                                  "rendezvous of symmetric memory",
                                  "registration of a window's tensor"};
static_assert(std::size(kNames) == kOps, "a name for each Op");

}  // namespace

const char* name_of(Op op) {
  // A value that came over the network may be outside the enum.
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "unknown operation";
}

}  // namespace ours
