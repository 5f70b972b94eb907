#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/call_record.h"
#include "collectives/members.h"

namespace ours {

/// What differs where two ranks expect blocks of different sizes in an all_gather.
std::string sizes_differ(const std::string& a, uint64_t bytes_a, const std::string& b, uint64_t bytes_b,
                         const std::string& from, const CallRecord& record);

/// Compares the sizes that this member expects, one for each rank, with those of the member before it, and fails the
/// group if they differ. If any two members expect different sizes, so do two neighbours; a dissemination afterwards
/// lets all know.
void compare_sizes(const Members& members, const std::vector<uint64_t>& sizes, const CallRecord& record);

}  // namespace ours
