#include "transport/tcp/tcp_config.h"

namespace ours {

TcpConfig TcpConfig::from_options(const std::string& master) {
  const Options& options = ours::options();
  TcpConfig config;
  config.interface = options.interface;
  config.master = master;
  config.ports = options.port_range;
  config.congestion = options.tcp_congestion;
  config.plan.wire = options.wire_type;
  if (options.tcp_streams != 0) config.plan.streams = static_cast<int>(options.tcp_streams);
  return config;
}

}  // namespace ours
