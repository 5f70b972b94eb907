#include "transport/tcp/tcp_config.h"

#include <algorithm>

namespace ours {

namespace {

/// One for each of the names in OURS_INTERFACE, so that each path has one.
int automatic_streams(const std::string& names) {
  constexpr std::ptrdiff_t kMost = 16;
  if (names.rfind('^', 0) == 0) return 1;
  return static_cast<int>(std::min(std::count(names.begin(), names.end(), ',') + 1, kMost));
}

}  // namespace

TcpConfig TcpConfig::from_options(const std::string& master) {
  const Options& options = ours::options();
  TcpConfig config;
  config.interface = options.interface;
  config.master = master;
  config.ports = options.port_range;
  config.congestion = options.tcp_congestion;
  config.plan.wire = options.wire_type;
  const auto asked = static_cast<int>(options.tcp_streams);
  config.plan.streams = asked != 0 ? asked : automatic_streams(options.interface);
  return config;
}

}  // namespace ours
