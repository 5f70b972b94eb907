#include "transport/tcp/tcp_config.h"

#include <algorithm>

namespace ours {

TcpConfig TcpConfig::from_options(const std::string& master) {
  constexpr std::ptrdiff_t kMost = 15;
  const Options& options = ours::options();
  TcpConfig config;
  config.interface = options.interface;
  config.master = master;
  config.ports = options.port_range;
  config.congestion = options.tcp_congestion;
  config.plan.wire = options.wire_type;
  // A stream for each path, as far as the names tell how many there are.
  const std::string& names = options.interface;
  const auto named = names.rfind('^', 0) == 0 ? 0 : std::count(names.begin(), names.end(), ',');
  config.plan.streams = static_cast<int>(options.tcp_streams != 0 ? options.tcp_streams : std::min(named, kMost) + 1);
  return config;
}

}  // namespace ours
