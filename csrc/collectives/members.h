#pragma once

#include <functional>
#include <vector>

#include "transport/tcp/tcp_call.h"

namespace ours {

/// Some ranks of a call over TCP, of which this one is ranks[place].
struct Members {
  TcpCall& tcp;
  const std::vector<int>& ranks;
  size_t place;
  /// Moves messages until the function that it is given returns true.
  std::function<void(const std::function<bool()>&)> wait;

  size_t size() const { return ranks.size(); }
  /// Places count on from the first after the last.
  int rank_at(size_t at) const { return ranks[at % size()]; }
};

}  // namespace ours
