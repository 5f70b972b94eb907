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

/// Returns once all members are known to expect the same sizes, of which there is one for each rank; fails the group if
/// they do not. It is a dissemination (see dissemination.h) of the sizes, which also says that all are in the call.
void compare_sizes(const Members& members, const std::vector<uint64_t>& sizes, const CallRecord& record);

}  // namespace ours
