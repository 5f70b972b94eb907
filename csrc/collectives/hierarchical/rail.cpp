#include "collectives/hierarchical/rail.h"

#include <algorithm>

namespace ours {

Rail::Rail(TcpCall& tcp, Job job)
    : tcp_(tcp),
      job_(std::move(job)),
      element_(size_of(job_.dtype)),
      chunks_(job_.slices.chunks),
      slots_(std::min(chunks_, most_slots())),
      slice_bytes_(whole_lines(job_.slices.longest() * element_)) {}

}  // namespace ours
