#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "collectives/call_record.h"
#include "transport/tcp/tcp_call.h"

namespace ours {

/// What differs where two ranks expect blocks of different sizes in an all_gather.
std::string sizes_differ(const std::string& a, uint64_t bytes_a, const std::string& b, uint64_t bytes_b,
                         const std::string& from, const CallRecord& record);

/// Compares the sizes that members[place] expects, one for each rank, with those of the member before it, and fails the
/// group if they differ. If any two members expect different sizes, so do two neighbours; a dissemination afterwards
/// lets all know. `wait` returns once the function that it is given does.
void compare_sizes(TcpCall& tcp, const std::vector<int>& members, int place, const std::vector<uint64_t>& sizes,
                   const CallRecord& record, const std::function<void(const std::function<bool()>&)>& wait);

}  // namespace ours
