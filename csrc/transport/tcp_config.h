#pragma once

#include <cstddef>
#include <string>

#include "common/options.h"

namespace ours {

/// What all ranks of a group must do alike. Rank 0's holds: the environments of ranks may differ.
struct TcpPlan {
  int streams = 1;                  ///< connections that share the bytes between two ranks
  size_t chunk_bytes = 256 * 1024;  ///< the parts in which large messages travel; a multiple of 64
  /// The most that a rank sends of a reduction's input where the whole goes to every rank that reduces it.
  size_t small_bytes = 64 * 1024;
  int direct_ranks = 16;              ///< up to so many ranks every rank talks to every other
  WireType wire = WireType::Float32;  ///< see OURS_WIRE_DTYPE
};

struct TcpConfig {
  std::string interface;  ///< see OURS_INTERFACE
  std::string master;     ///< name or address of the job's master, to which a route is looked for; may be empty
  PortRange ports;
  TcpPlan plan;

  /// From OURS_INTERFACE, OURS_PORT_RANGE and OURS_TCP_STREAMS.
  static TcpConfig from_options(const std::string& master);
};

}  // namespace ours
