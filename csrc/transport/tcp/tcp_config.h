#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "common/options.h"

namespace ours {

/// Settings that must be equal on all ranks of a group. Those of rank 0 hold, since the environments of ranks may
/// differ, and travel as the terms of the group; the rules are known to all ranks before.
struct TcpPlan {
  int streams = 1;                    ///< connections that share the bytes between two ranks
  size_t chunk_bytes = 256 * 1024;    ///< the parts in which large messages travel; a multiple of 64
  WireType wire = WireType::Float32;  ///< see OURS_WIRE_DTYPE
  std::string rules;  ///< the user's rules of the table of algorithms (Selection), before the built-in ones
};

struct TcpConfig {
  std::string interface;  ///< see OURS_INTERFACE
  std::string master;     ///< name or address of the job's master; the network that leads there is used; may be empty
  PortRange ports;
  std::string congestion;  ///< see OURS_TCP_CONGESTION
  /// For how long a peer may leave unanswered what was sent.
  std::chrono::milliseconds unanswered = std::chrono::seconds(30);
  TcpPlan plan;

  /// Reads all from the options except plan.rules.
  static TcpConfig from_options(const std::string& master);
};

}  // namespace ours
