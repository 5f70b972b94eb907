#pragma once

#include <string>

namespace ours {

/// This machine's name as one word; "unknown" if it has none.
std::string host_name();

/// "(host node1, pid 4711)"
std::string process_name(const std::string& host, int pid);

/// This process, in the way in which messages name a rank: "rank 3 (host node7, pid 1234)".
std::string describe_own(int rank);

}  // namespace ours
